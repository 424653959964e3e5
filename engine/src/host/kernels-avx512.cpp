// AVX-512 with VNNI. Built with these instructions: nothing in here may be inline elsewhere.
//
// Lane m of each of the four vectors of 256 unpacked weights, as unpack_turned() makes them, holds 4 weights of the same
// group of 16, so that four vpdpbusd sum a whole group in a lane: per token and 256 weights that is 4 multiply-adds of bytes,
// one conversion and three float operations.
#include "kernels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#    include "exp-512.h"
#    include "formats-512.h"

namespace {

typedef __m512 vec;

SPAC_INLINE vec zero() {
    return _mm512_setzero_ps();
}

// ---- quantised rows

// Unpacked and transposed. Specialised in lowbit-512.h and nibbles-512.h, where both at once cost less; bytes and scales may
// differ from unpack()'s, the weights not.
template <typename F>
SPAC_INLINE weights unpack_turned(const typename F::block * b) {
    weights w = unpack<F>(b);
    transpose(w.q);
    return w;
}

} // namespace

#    include "lowbit-512.h"
#    include "nibbles-512.h"

namespace {

template <typename F, int NT>
SPAC_INLINE void add_block(const typename F::block * b, const spac_act_q8 * const * acts, int64_t ib, __m512 * sums) {
    const weights w = unpack_turned<F>(b);
    for (int t = 0; t < NT; t++) {
        const spac_act_q8 & a   = acts[t][ib];
        __m512i             dot = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) {
            dot = _mm512_dpbusd_epi32(dot, w.q[i], _mm512_load_si512(a.q + 64 * i));
        }
        const __m512 scale = _mm512_mul_ps(w.scale, _mm512_load_ps(a.d));
        sums[t]            = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sums[t]);
        sums[t]            = _mm512_fnmadd_ps(w.offset, _mm512_load_ps(a.s), sums[t]);
    }
}

SPAC_INLINE float sum_of(__m512 x) {
    return _mm512_reduce_add_ps(x);
}

// ---- f16 and bf16 rows, f32 activations

struct f16 {
    static SPAC_INLINE __m512 load(const uint16_t * w) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) w)); }
    static SPAC_INLINE __m512 load(const uint16_t * w, __mmask16 m) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, w)); }
};

struct bf16 {
    static SPAC_INLINE __m512 widen(__m256i w) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16)); }
    static SPAC_INLINE __m512 load(const uint16_t * w) { return widen(_mm256_loadu_si256((const __m256i *) w)); }
    static SPAC_INLINE __m512 load(const uint16_t * w, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, w)); }
};

// one row for few tokens: one stream of weights, and several chains of additions that need not wait for each other
template <typename F, int NT>
SPAC_INLINE void dot_one(const uint16_t * row, int64_t n_cols, const char * const * acts, float * const * out, int64_t ir) {
    __m512 sums[4][NT];
    for (int i = 0; i < 4 * NT; i++) {
        sums[i % 4][i / 4] = _mm512_setzero_ps();
    }
    int64_t i = 0;
    for (; i + 64 <= n_cols; i += 64) {
        for (int k = 0; k < 4; k++) {
            const __m512 w = F::load(row + i + 16 * k);
            for (int t = 0; t < NT; t++) {
                sums[k][t] = _mm512_fmadd_ps(w, _mm512_load_ps((const float *) acts[t] + i + 16 * k), sums[k][t]);
            }
        }
    }
    for (; i < n_cols; i += 16) {
        const __mmask16 rest = (__mmask16) _bzhi_u32(0xFFFF, (unsigned) (n_cols - i < 16 ? n_cols - i : 16));
        const __m512    w    = F::load(row + i, rest);
        for (int t = 0; t < NT; t++) { // the activations are padded with zeros
            sums[0][t] = _mm512_fmadd_ps(w, _mm512_load_ps((const float *) acts[t] + i), sums[0][t]);
        }
    }
    for (int t = 0; t < NT; t++) {
        out[t][ir] = sum_of(_mm512_add_ps(_mm512_add_ps(sums[0][t], sums[1][t]), _mm512_add_ps(sums[2][t], sums[3][t])));
    }
}

// two rows for many tokens: f32 activations are large, and each vector of them read serves both
template <typename F, int NT>
SPAC_INLINE void dot_two(const uint16_t * row0, const uint16_t * row1, int64_t n_cols, const char * const * acts,
                         float * const * out, int64_t ir0, int64_t ir1) {
    __m512 sums[2][NT];
    for (int t = 0; t < NT; t++) {
        sums[0][t] = sums[1][t] = _mm512_setzero_ps();
    }
    int64_t i = 0;
    for (; i + 16 <= n_cols; i += 16) {
        if (i % 32 == 0) {
            prefetch_ahead(row0 + i, 64);
            prefetch_ahead(row1 + i, 64);
        }
        const __m512 w0 = F::load(row0 + i), w1 = F::load(row1 + i);
        for (int t = 0; t < NT; t++) {
            const __m512 x = _mm512_load_ps((const float *) acts[t] + i);
            sums[0][t]     = _mm512_fmadd_ps(w0, x, sums[0][t]);
            sums[1][t]     = _mm512_fmadd_ps(w1, x, sums[1][t]);
        }
    }
    if (i < n_cols) {
        const __mmask16 rest = (__mmask16) _bzhi_u32(0xFFFF, (unsigned) (n_cols - i));
        const __m512    w0 = F::load(row0 + i, rest), w1 = F::load(row1 + i, rest);
        for (int t = 0; t < NT; t++) {
            const __m512 x = _mm512_load_ps((const float *) acts[t] + i); // padded with zeros
            sums[0][t]     = _mm512_fmadd_ps(w0, x, sums[0][t]);
            sums[1][t]     = _mm512_fmadd_ps(w1, x, sums[1][t]);
        }
    }
    for (int t = 0; t < NT; t++) {
        out[t][ir0] = sum_of(sums[0][t]);
        out[t][ir1] = sum_of(sums[1][t]);
    }
}

template <typename F, int NT>
void dot_floats(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, float * const * out) {
    for (int64_t ir = 0; NT <= 2 && ir < n_rows; ir++) {
        dot_one<F, NT>((const uint16_t *) (rows + ir * row_bytes), n_cols, acts, out, ir);
    }
    for (int64_t ir = 0; NT > 2 && ir < n_rows; ir += 2) {
        const int64_t next = ir + 1 < n_rows ? ir + 1 : ir; // an odd last row is computed twice
        dot_two<F, NT>((const uint16_t *) (rows + ir * row_bytes), (const uint16_t *) (rows + next * row_bytes), n_cols, acts, out, ir, next);
    }
}

// ---- activations

// 32 floats to bytes; returns the scale that fits them best in the sense of least squares
SPAC_INLINE float quantise_32(const float * x, int8_t * q) {
    const __m512  a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const float   max     = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const __m512  inverse = _mm512_set1_ps(max > 0 ? 127 / max : 0);
    const __m512i ia = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), ib = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    _mm_store_si128((__m128i *) q, _mm512_cvtepi32_epi8(ia));
    _mm_store_si128((__m128i *) (q + 16), _mm512_cvtepi32_epi8(ib));

    const __m512 fa = _mm512_cvtepi32_ps(ia), fb = _mm512_cvtepi32_ps(ib);
    const float  xq = _mm512_reduce_add_ps(_mm512_fmadd_ps(a, fa, _mm512_mul_ps(b, fb)));
    const float  qq = _mm512_reduce_add_ps(_mm512_fmadd_ps(fa, fa, _mm512_mul_ps(fb, fb)));
    return qq > 0 ? xq / qq : 0;
}

SPAC_INLINE void quantise_256(const float * x, spac_act_q8 * act) {
    alignas(64) int8_t q[SPAC_BLOCK];
    alignas(32) float  d[8];
    for (int i = 0; i < 8; i++) {
        d[i] = quantise_32(x + 32 * i, q + 32 * i);
    }
    __m512i v[4] = { load_halves(q, q + 64), load_halves(q + 128, q + 192), load_halves(q + 32, q + 96), load_halves(q + 160, q + 224) };
    transpose(v);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
        _mm512_store_si512(act->q + 64 * i, v[i]);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), v[i]);
    }
    const __m512 scale = spread_blocks(_mm256_load_ps(d));
    _mm512_store_ps(act->d, scale);
    _mm512_store_ps(act->s, _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sum)));
}

void swish(float * x, int64_t n, float alpha) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = n - i >= 16 ? 0xFFFF : (__mmask16) _bzhi_u32(0xFFFF, (unsigned) (n - i));
        const __m512    v = _mm512_maskz_loadu_ps(m, x + i);
        const __m512    e = exp_ps(_mm512_mul_ps(v, _mm512_set1_ps(-alpha)));
        _mm512_mask_storeu_ps(x + i, m, _mm512_div_ps(v, _mm512_add_ps(_mm512_set1_ps(1), e)));
    }
}

} // namespace

#    include "kernel-table.h"
#    include "panel-512.h"

// ---- attention

namespace {

static constexpr int LANE_VECS = 4;

SPAC_INLINE void store_ps(float * p, vec x) {
    _mm512_store_ps(p, x);
}

SPAC_INLINE vec set_ps(float x) {
    return _mm512_set1_ps(x);
}

SPAC_INLINE vec add_mul(vec a, vec b, vec c) {
    return _mm512_fmadd_ps(b, c, a);
}

SPAC_INLINE vec mul(vec a, vec b) {
    return _mm512_mul_ps(a, b);
}

SPAC_INLINE vec sub(vec a, vec b) {
    return _mm512_sub_ps(a, b);
}

SPAC_INLINE vec larger(vec a, vec b) {
    return _mm512_max_ps(a, b);
}

SPAC_INLINE vec widen_halves(const uint16_t * p) {
    return f16::load(p);
}

} // namespace

#    include "attention-lanes.h"

static const spac_kernels kernels = { "avx512", quantise, find_dot, swish, find_panel, &attention };

const spac_kernels * spac_kernels_avx512() {
    return &kernels;
}

#else

const spac_kernels * spac_kernels_avx512() {
    return nullptr;
}

#endif
