// What the kernels of every instruction set need, with F16C at least. Without linkage, so that each kernels-*.cpp has a
// copy built with its own instructions.
#pragma once

#include "blocks.h"

#include <immintrin.h>
#include <stddef.h>

namespace {

// n bytes of weights, SPAC_PREFETCH_BYTES from here; the address need not be valid
SPAC_INLINE void prefetch_ahead(const void * p, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        _mm_prefetch((const char *) ((uintptr_t) p + SPAC_PREFETCH_BYTES + i), _MM_HINT_T0);
    }
}

SPAC_INLINE float half_to_float(uint16_t h) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}

} // namespace
