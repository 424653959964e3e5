// Panels of 16-bit weights, for AVX2 and formats of 8-bit weights, whose products leave sums of 16 bits no room. Included by
// panel-256.h, whose layout it follows: here a vector holds 2 weights of each of 8 rows.
//
// 256 weights of a row have one scale, and so have 256 activations: their products add up in 32 bits without a rounding, as
// 256 * WEIGHT_MAX * ACT_MAX < 2^31. Both are finer than the 8 bits of SPAC_ACT_Q8 by far, also where one of 256 is the largest.
#pragma once

#include "kernels.h"

namespace {

static constexpr int WEIGHT_MAX = 2048, ACT_MAX = 4095;

static_assert((int64_t) SPAC_BLOCK * WEIGHT_MAX * ACT_MAX < (int64_t) 1 << 31, "sums of 32 bits");

// 256 weights of TILE_ROWS rows
struct word_block {
    __m256i q[SPAC_BLOCK / 2][PANEL_VECS]; // 2 weights each
    __m256  scale[PANEL_VECS];
};

// what an unsigned byte of a weight of zero is
template <typename F>
constexpr int ZERO_BYTE = F::IS_SIGNED ? 0 : F::LARGEST / 2;

// the largest size of a byte without it
template <typename F>
constexpr int LARGEST_SIZE = F::IS_SIGNED ? F::LARGEST : F::LARGEST - ZERO_BYTE<F>;

// of the largest of 256 scales; of a byte times its factor the lowest 7 bits go
template <typename F>
constexpr int FACTOR_MAX = WEIGHT_MAX * 128 / LARGEST_SIZE<F>;

// zero; but NaN where a float is no number or infinite
SPAC_INLINE float zero_if_finite(__m256 a, __m256 b) {
    const __m256 none = _mm256_setzero_ps();
    return sum_of(_mm256_fmadd_ps(a, none, _mm256_mul_ps(b, none)));
}

SPAC_INLINE __m256 size_of(__m256 x) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

// ---- unpacking

// 256 weights of 8 rows, as signed bytes with factors
struct factored_rows {
    alignas(32) int8_t q[2][4][8][32];   // halves, blocks of 32, rows
    alignas(32) int32_t factor[2][8][8]; // halves, rows, lanes; twice the 16 bits
};

// a row; returns its scale
template <typename F>
SPAC_INLINE float factor_row(const typename F::block * b, int row, factored_rows & to) {
    const half_weights w[2]    = { F::unpack(b, 0), F::unpack(b, 1) };
    const float        max     = max_of(_mm256_max_ps(size_of(w[0].scale), size_of(w[1].scale)));
    const __m256       inverse = _mm256_set1_ps(max > 0 ? FACTOR_MAX<F> / max : 0);
    for (int half = 0; half < 2; half++) {
        const __m256i factor = _mm256_cvtps_epi32(_mm256_mul_ps(w[half].scale, inverse));
        _mm256_store_si256((__m256i *) to.factor[half][row], _mm256_blend_epi16(factor, _mm256_slli_epi32(factor, 16), 0xAA));
        for (int i = 0; i < 4; i++) {
            _mm256_store_si256((__m256i *) to.q[half][i][row], _mm256_sub_epi8(w[half].q[i], _mm256_set1_epi8(ZERO_BYTE<F>)));
        }
    }
    return max * (128.0f / FACTOR_MAX<F>) +zero_if_finite(w[0].scale, w[1].scale);
}

// of 4 bytes of a row the first and third become the words of one vector, the others those of the next
SPAC_INLINE void widen_rows(const factored_rows & from, word_block & to, int vec) {
    const __m256i odd          = _mm256_set1_epi16((short) 0xff00);
    __m256i(*word)[PANEL_VECS] = to.q;
    for (int half = 0; half < 2; half++) {
        __m256i factor[2][4]; // group of 16 of a block, block
        for (int i = 0; i < 2; i++) {
            gather_rows((const char *) (from.factor[half][0] + 4 * i), sizeof(from.factor[half][0]), factor[i]);
        }
        for (int ib = 0; ib < 4; ib++) {
            for (int i = 0; i < 2; i++) {
                __m256i x[4];
                gather_rows((const char *) from.q[half][ib][0] + 16 * i, 32, x);
                for (int j = 0; j < 4; j++, word += 2) {
                    word[0][vec] = _mm256_mulhrs_epi16(_mm256_slli_epi16(x[j], 8), factor[i][ib]);
                    word[1][vec] = _mm256_mulhrs_epi16(_mm256_and_si256(x[j], odd), factor[i][ib]);
                }
            }
        }
    }
}

// 8 rows, of which n_rows exist; the others are zeros
template <typename F>
void unpack_word_vec(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, word_block * to, int vec) {
    factored_rows     factored = {};
    alignas(32) float scale[8] = {};
    for (int64_t i = 0; i < n_cols; i += SPAC_BLOCK, to++) {
        for (int64_t ir = 0; ir < n_rows; ir++) {
            typename F::block rest[SPAC_BLOCK / F::N];
            scale[ir] = factor_row<F>(block_at<F>(rows + ir * row_bytes, i, n_cols, rest), (int) ir, factored);
        }
        widen_rows(factored, *to, vec);
        to->scale[vec] = _mm256_load_ps(scale);
    }
}

// ---- multiplying

template <int NT>
void multiply_words(const word_block * w, const char * const * acts, int64_t ib, panel_sums * to) {
    const spac_act_i16 * a[NT];
    __m256i              dots[NT][PANEL_VECS];
    for (int t = 0; t < NT; t++) {
        a[t] = (const spac_act_i16 *) acts[t] + ib;
        for (int v = 0; v < PANEL_VECS; v++) {
            dots[t][v] = _mm256_setzero_si256();
        }
    }
    for (int first = 0; first < SPAC_BLOCK / 2; first += 16) {
#pragma GCC unroll 16
        for (int i = first; i < first + 16; i++) {
            for (int t = 0; t < NT; t++) {
                int32_t x;
                memcpy(&x, a[t]->q + 2 * i, sizeof(x));
                for (int v = 0; v < PANEL_VECS; v++) {
                    dots[t][v] = _mm256_add_epi32(dots[t][v], _mm256_madd_epi16(w->q[i][v], _mm256_set1_epi32(x)));
                    stay(dots[t][v]);
                }
            }
        }
    }
    for (int t = 0; t < NT; t++) {
        for (int v = 0; v < PANEL_VECS; v++) {
            const __m256 scale = _mm256_mul_ps(w->scale[v], _mm256_set1_ps(a[t]->d));
            to[t].v[v]         = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t][v]), scale, to[t].v[v]);
        }
    }
}

template <typename F>
struct word_tile {
    typedef word_block block;

    static constexpr int           N_BLOCKS = 1, N_TOKENS_MIN = 16;
    static constexpr spac_act_form FORM = SPAC_ACT_I16;

    static void unpack(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, block * to, int vec) {
        unpack_word_vec<F>(rows, row_bytes, n_rows, n_cols, to, vec);
    }

    template <int NT>
    static void multiply(const block * w, const char * const * acts, int64_t ib, panel_sums * to) {
        multiply_words<NT>(w, acts, ib, to);
    }
};

// ---- activations

SPAC_INLINE void quantise_256_i16(const float * x, spac_act_i16 * act) {
    __m256 size = _mm256_setzero_ps(), none = size;
    for (int i = 0; i < SPAC_BLOCK; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        size           = _mm256_max_ps(size, size_of(v));
        none           = _mm256_fmadd_ps(v, _mm256_setzero_ps(), none);
    }
    const float  max     = max_of(size);
    const __m256 inverse = _mm256_set1_ps(max > 0 ? ACT_MAX / max : 0);
    for (int i = 0; i < SPAC_BLOCK; i += 16) {
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), inverse));
        const __m256i q = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
        _mm256_store_si256((__m256i *) (act->q + i), _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(q, 0xD8), 0xD8)); // as widen_rows() does
    }
    act->d = max / ACT_MAX + sum_of(none);
}

void quantise_i16(const float * x, int64_t n_cols, char * act) {
    spac_act_i16 * to = (spac_act_i16 *) act;
    int64_t        i  = 0;
    for (; i + SPAC_BLOCK <= n_cols; i += SPAC_BLOCK) {
        quantise_256_i16(x + i, to++);
    }
    if (i < n_cols) {
        float rest[SPAC_BLOCK] = {};
        memcpy(rest, x + i, (n_cols - i) * sizeof(float));
        quantise_256_i16(rest, to);
    }
}

} // namespace
