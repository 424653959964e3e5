// Exponential functions with AVX-512.
#pragma once

#include "blocks.h"

#include <immintrin.h>

namespace {

// e^x to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]
SPAC_INLINE __m512 exp_ps(__m512 x) {
    static const float coefficients[] = { 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f };

    x              = _mm512_max_ps(_mm512_set1_ps(-104), _mm512_min_ps(_mm512_set1_ps(104), x)); // 0 and inf; NaN stays
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512       r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r              = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p       = _mm512_set1_ps(1.0f / 5040);
    for (float c : coefficients) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    return _mm512_scalef_ps(p, n);
}

// 2^x to 2e-7, 1 for 0: a polynomial on [0, 1) whose largest relative error, 1e-7, is nearly the least of those that are 1 at 0
SPAC_INLINE __m512 exp2_ps(__m512 x) {
    static const float coefficients[] = { 0.00901703002f, 0.0557999133f, 0.24016445f, 0.693151312f, 1.0f };

    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); // x - floor(x)
    __m512       p = _mm512_set1_ps(0.00186713021f);
    for (float c : coefficients) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    return _mm512_scalef_ps(p, x); // p * 2^floor(x)
}

} // namespace
