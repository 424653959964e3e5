// Panels in vectors of 256 bits: SPAC_PANEL_ROWS rows unpacked once, for any number of tokens. Included by kernels-256.h.
//
// A vector holds 4 weights of each of 8 rows, a row in each 32-bit lane. Every lane gets the same 4 activations of a token,
// so that a row's products add up in its own lane, and nothing is summed across lanes. Weights are unsigned bytes (weight =
// scale * q - offset). Without VNNI products are added in 16 bits for as long as the format's largest byte allows, which
// is what makes this faster than dot_rows(): bytes of 8 bits go to panel-words.h. Both ways give the same integers, so the same
// bits.
#pragma once

#include "panel-rows.h"

#include <type_traits>

namespace {

static constexpr int VEC_ROWS   = 8;
static constexpr int PANEL_VECS = 2; // that one pass over the activations serves
static constexpr int TILE_ROWS  = VEC_ROWS * PANEL_VECS;
static constexpr int TILE_ACTS  = 4; // tokens in registers; 6 were slower

// ---- what the formats' bytes allow

// signed weights become unsigned bytes by adding 128
template <typename F>
constexpr int MAX_BYTE = F::IS_SIGNED ? 255 : F::LARGEST;

// 32 weights of TILE_ROWS rows
template <int N_GROUPS>
struct panel_block {
    __m256i q[8][PANEL_VECS]; // 4 weights each
    __m256  scale[N_GROUPS][PANEL_VECS], offset[N_GROUPS][PANEL_VECS];
};

struct panel_sums { // of a token
    __m256 v[PANEL_VECS];
};

// ---- unpacking

// half of 256 weights of 8 rows, as bytes with scales and offsets
struct unpacked_rows {
    alignas(32) uint8_t q[4][8][32]; // blocks of 32, rows
    alignas(32) float scale[8][8], offset[8][8];
};

// four times 4 words of 8 rows, the rows in lanes
SPAC_INLINE void gather_rows(const char * rows, size_t row_bytes, __m256i * x) {
    for (int i = 0; i < 4; i++) {
        const __m128i low = _mm_load_si128((const __m128i *) (rows + i * row_bytes)), high = _mm_load_si128((const __m128i *) (rows + (i + 4) * row_bytes));
        x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
    transpose(x);
}

template <typename F>
SPAC_INLINE void unpack_row(const typename F::block * b, int half, int row, unpacked_rows & to) {
    const half_weights w = F::unpack(b, half);
    for (int i = 0; i < 4; i++) {
        const __m256i q = F::IS_SIGNED ? _mm256_xor_si256(w.q[i], _mm256_set1_epi8((char) 0x80)) : w.q[i];
        _mm256_store_si256((__m256i *) to.q[i][row], q);
    }
    _mm256_store_ps(to.scale[row], w.scale);
    _mm256_store_ps(to.offset[row], F::IS_SIGNED ? _mm256_mul_ps(w.scale, _mm256_set1_ps(128)) : w.offset);
}

// into the 4 blocks at `to`
template <int N_GROUPS>
SPAC_INLINE void interleave_rows(const unpacked_rows & from, panel_block<N_GROUPS> * to, int vec) {
    for (int ib = 0; ib < 4; ib++) {
        for (int i = 0; i < 2; i++) {
            __m256i x[4];
            gather_rows((const char *) from.q[ib][0] + 16 * i, 32, x);
            for (int j = 0; j < 4; j++) {
                to[ib].q[4 * i + j][vec] = x[j];
            }
        }
    }
    for (int ig = 0; ig < N_GROUPS; ig++) {
        __m256i scale[4], offset[4];
        gather_rows((const char *) (from.scale[0] + 4 * ig), 32, scale);
        gather_rows((const char *) (from.offset[0] + 4 * ig), 32, offset);
        for (int ib = 0; ib < 4; ib++) {
            to[ib].scale[ig][vec]  = _mm256_castsi256_ps(scale[ib]);
            to[ib].offset[ig][vec] = _mm256_castsi256_ps(offset[ib]);
        }
    }
}

// 8 rows, of which n_rows exist; the others are zeros
template <typename F>
void unpack_vec(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, panel_block<N_SCALES<F>> * to, int vec) {
    unpacked_rows unpacked[2];
    memset((void *) unpacked, 0, sizeof(unpacked));
    for (int64_t i = 0; i < n_cols; i += SPAC_BLOCK) {
        for (int64_t ir = 0; ir < n_rows; ir++) {
            typename F::block         rest[SPAC_BLOCK / F::N];
            const typename F::block * b = block_at<F>(rows + ir * row_bytes, i, n_cols, rest);
            unpack_row<F>(b, 0, (int) ir, unpacked[0]);
            unpack_row<F>(b, 1, (int) ir, unpacked[1]);
        }
        interleave_rows(unpacked[0], to + i / 32, vec);
        interleave_rows(unpacked[1], to + i / 32 + 4, vec);
    }
}

// ---- multiplying

// a sum stays where it is: the compiler would first compute all products of a sum, and find no room for them
SPAC_INLINE void stay(__m256i & x) {
    __asm__("" : "+x"(x));
}

// 4 activations of block ib of a half, in each lane
SPAC_INLINE __m256i spread_acts(const int8_t * half, int ib, int step) {
    int32_t x;
    memcpy(&x, half + 4 * ib + 16 * (step / 4) + 32 * (step % 4), sizeof(x));
    return _mm256_set1_epi32(x);
}

typedef const __m256i (*panel_words)[PANEL_VECS];

// sums of 4 products per lane and step, over n_steps steps
template <int N_STEPS, int NT>
SPAC_INLINE void add_steps(panel_words q, const int8_t * const * acts, int ib, int first, __m256i (*dots)[PANEL_VECS]) {
#ifdef __AVXVNNI__
#    pragma GCC unroll 8
    for (int i = 0; i < N_STEPS; i++) {
        for (int t = 0; t < NT; t++) {
            const __m256i x = spread_acts(acts[t], ib, first + i);
            for (int v = 0; v < PANEL_VECS; v++) {
                dots[t][v] = add_products(dots[t][v], q[first + i][v], x);
            }
        }
    }
#else
    __m256i sums[NT][PANEL_VECS];
#    pragma GCC unroll 8
    for (int i = 0; i < N_STEPS; i++) {
        for (int t = 0; t < NT; t++) {
            const __m256i x = spread_acts(acts[t], ib, first + i);
            for (int v = 0; v < PANEL_VECS; v++) {
                const __m256i products = _mm256_maddubs_epi16(q[first + i][v], x);
                sums[t][v]             = i == 0 ? products : _mm256_add_epi16(sums[t][v], products);
                stay(sums[t][v]);
            }
        }
    }
    for (int t = 0; t < NT; t++) {
        for (int v = 0; v < PANEL_VECS; v++) {
            dots[t][v] = _mm256_add_epi32(dots[t][v], _mm256_madd_epi16(sums[t][v], _mm256_set1_epi16(1)));
        }
    }
#endif
}

// group ig of block ib of a half: its whole products, in lanes
template <int N_SUM, int N_GROUPS, int NT>
SPAC_INLINE void dot_group(const panel_block<N_GROUPS> & w, const int8_t * const * acts, int ib, int ig, __m256i (*dots)[PANEL_VECS]) {
    constexpr int N_STEPS = 8 / N_GROUPS, N_AT_ONCE = N_SUM == 0 || N_SUM > N_STEPS ? N_STEPS : N_SUM;
    for (int t = 0; t < NT; t++) {
        for (int v = 0; v < PANEL_VECS; v++) {
            dots[t][v] = _mm256_setzero_si256();
        }
    }
#pragma GCC unroll 8
    for (int first = ig * N_STEPS; first < (ig + 1) * N_STEPS; first += N_AT_ONCE) {
        add_steps<N_AT_ONCE, NT>(w.q, acts, ib, first, dots);
    }
}

// adds TILE_ROWS rows of 256 weights times NT tokens; ib: which 256
template <int N_SUM, int N_GROUPS, int NT>
void multiply_bytes(const panel_block<N_GROUPS> * w, const char * const * acts, int64_t ib, panel_sums * to) {
    __m256 sums[NT][PANEL_VECS];
    memcpy(sums, to, sizeof(sums));
    for (int half = 0; half < 2; half++) {
        const int8_t * q[NT];
        const float *  d[NT];
        for (int t = 0; t < NT; t++) {
            const spac_act_q8 * a = (const spac_act_q8 *) acts[t] + ib;
            q[t]                  = half_q(*a, half);
            d[t]                  = a->d + 8 * half;
        }
        for (int i = 0; i < 4; i++, w++) {
#pragma GCC unroll 2
            for (int ig = 0; ig < N_GROUPS; ig++) {
                __m256i dots[NT][PANEL_VECS];
                dot_group<N_SUM, N_GROUPS, NT>(*w, q, i, ig, dots);
                for (int t = 0; t < NT; t++) {
                    const float *s = d[t] + 16, sum = N_GROUPS == 1 ? s[i] + s[i + 4] : s[i + 4 * ig];
                    for (int v = 0; v < PANEL_VECS; v++) {
                        const __m256 scale = _mm256_mul_ps(w->scale[ig][v], _mm256_set1_ps(d[t][i]));
                        sums[t][v]         = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t][v]), scale, sums[t][v]);
                        sums[t][v]         = _mm256_fnmadd_ps(w->offset[ig][v], _mm256_set1_ps(sum), sums[t][v]);
                    }
                }
            }
        }
    }
    memcpy((void *) to, sums, sizeof(sums));
}

// ---- one panel per format

// what a panel of format F is made of
template <typename F>
struct byte_tile {
    typedef panel_block<N_SCALES<F>> block;

    static constexpr int           N_SUM = n_pairs_in_16_bits(MAX_BYTE<F>), N_BLOCKS = SPAC_BLOCK / 32, N_TOKENS_MIN = N_SCALES<F> == 1 ? 16 : 24;
    static constexpr spac_act_form FORM = SPAC_ACT_Q8;

    static void unpack(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, block * to, int vec) {
        unpack_vec<F>(rows, row_bytes, n_rows, n_cols, to, vec);
    }

    template <int NT>
    static void multiply(const block * w, const char * const * acts, int64_t ib, panel_sums * to) {
        multiply_bytes<N_SUM, N_SCALES<F>, NT>(w, acts, ib, to);
    }
};

#ifdef __AVXVNNI__

template <typename F>
using tile_of = byte_tile<F>;

#else

} // namespace

#    include "panel-words.h"

namespace {

template <typename F>
using tile_of = std::conditional_t<(byte_tile<F>::N_SUM < 2), word_tile<F>, byte_tile<F>>;

#endif

} // namespace

#include "panel-table.h"
