// Panels in vectors of 512 bits, with VNNI: as in panel-256.h, with 16 rows in the lanes of a vector. Included by
// kernels-avx512.cpp.
#pragma once

#include "panel-rows.h"

namespace {

static constexpr int VEC_ROWS   = 16;
static constexpr int PANEL_VECS = 2;
static constexpr int TILE_ROWS  = VEC_ROWS * PANEL_VECS;
static constexpr int TILE_ACTS  = 4; // tokens in registers; 6 and 8 were no faster

// the byte of a weight of zero, where it is the same in all blocks: the offset is scale * that byte; else 0, and there are offsets
template <typename F>
constexpr int ZERO_BYTE = 0;

#define SPAC_ZERO_BYTE(format, byte) \
    template <>                      \
    constexpr int ZERO_BYTE<format> = byte;

SPAC_ZERO_BYTE(q8_0, 128)
SPAC_ZERO_BYTE(q4_0, 8)
SPAC_ZERO_BYTE(q5_0, 16)
SPAC_ZERO_BYTE(iq4_nl, 128)
SPAC_ZERO_BYTE(mxfp4, 12)
SPAC_ZERO_BYTE(q6_k, 32)
SPAC_ZERO_BYTE(iq4_xs, 128)
SPAC_ZERO_BYTE(q2_0, 1)
SPAC_ZERO_BYTE(nvfp4, 12)
SPAC_ZERO_BYTE(q3_k, 4)
SPAC_ZERO_BYTE(tq2_0, 1)
SPAC_ZERO_BYTE(tq1_0, 1)
SPAC_ZERO_BYTE(iq2_xxs, SPAC_IQ2_OFFSET)
SPAC_ZERO_BYTE(iq2_xs, SPAC_IQ2_OFFSET)
SPAC_ZERO_BYTE(iq2_s, SPAC_IQ2_OFFSET)
SPAC_ZERO_BYTE(iq3_xxs, SPAC_IQ3_XXS_OFFSET)
SPAC_ZERO_BYTE(iq1_m, 9)

// 32 weights of TILE_ROWS rows
template <int N_GROUPS, bool HAS_OFFSET>
struct panel_block {
    __m512i q[8][PANEL_VECS]; // 4 weights each
    __m512  scale[N_GROUPS][PANEL_VECS], offset[HAS_OFFSET ? N_GROUPS : 0][PANEL_VECS];
};

template <typename F>
using panel_block_of = panel_block<N_SCALES<F>, ZERO_BYTE<F> == 0>;

struct panel_sums { // of a token
    __m512 v[PANEL_VECS];
};

// ---- unpacking

// 256 weights of 16 rows, each as unpack() leaves them
struct unpacked_rows {
    alignas(64) uint8_t q[4][VEC_ROWS][64];
    alignas(64) float scale[VEC_ROWS][16], offset[VEC_ROWS][16];
};

// into the 8 blocks at `to`
template <int N_GROUPS, bool HAS_OFFSET>
SPAC_INLINE void interleave_rows(const unpacked_rows & from, panel_block<N_GROUPS, HAS_OFFSET> * to, int vec) {
    __m512i x[16];
    for (int i = 0; i < 4; i++) { // vector i has blocks i / 2 + 4 * (i % 2) and the one 2 on
        turn_rows(from.q[i], x);
        for (int k = 0; k < 16; k++) {
            to[i / 2 + 4 * (i % 2) + 2 * (k / 8)].q[k % 8][vec] = x[k];
        }
    }
    turn_rows(from.scale, x);
    for (int k = 0; k < 8 * N_GROUPS; k++) {
        to[k % 8].scale[k / 8][vec] = _mm512_castsi512_ps(x[FIRST_LANE[k % 8] + 4 * (k / 8)]);
    }
    if constexpr (HAS_OFFSET) {
        turn_rows(from.offset, x);
        for (int k = 0; k < 8 * N_GROUPS; k++) {
            to[k % 8].offset[k / 8][vec] = _mm512_castsi512_ps(x[FIRST_LANE[k % 8] + 4 * (k / 8)]);
        }
    }
}

// VEC_ROWS rows, of which n_rows exist; the others are zeros
template <typename F>
void unpack_vec(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, panel_block_of<F> * to, int vec) {
    unpacked_rows unpacked;
    memset((void *) &unpacked, 0, sizeof(unpacked));
    for (int64_t i = 0; i < n_cols; i += SPAC_BLOCK) {
        for (int64_t ir = 0; ir < n_rows; ir++) {
            typename F::block rest[SPAC_BLOCK / F::N];
            const weights     w = unpack<F>(block_at<F>(rows + ir * row_bytes, i, n_cols, rest, VEC_ROWS * row_bytes)); // what comes after these rows
            for (int k = 0; k < 4; k++) {
                _mm512_store_si512(unpacked.q[k][ir], w.q[k]);
            }
            _mm512_store_ps(unpacked.scale[ir], w.scale);
            if (ZERO_BYTE<F> == 0) {
                _mm512_store_ps(unpacked.offset[ir], w.offset);
            }
        }
        interleave_rows(unpacked, to + i / 32, vec);
    }
}

// ---- multiplying

// what zero_byte in place of each weight adds to the sums of a block, with its sign changed
template <int N_GROUPS>
SPAC_INLINE void begin_sums(const spac_act_q8 & a, int zero_byte, int32_t * to) {
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char) zero_byte), _mm512_load_si512(a.q + 64 * i));
    }
    sum = N_GROUPS == 1 ? _mm512_add_epi32(sum, _mm512_shuffle_i32x4(sum, sum, 0xB1)) : sum; // of 32: 4 lanes on
    _mm512_store_si512(to, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
}

// the products of group ig of a block, in lanes
template <int N_STEPS, int NT>
SPAC_INLINE void add_steps(const __m512i (*q)[PANEL_VECS], const spac_act_q8 * const * acts, int first_lane, int first_step, __m512i (*dots)[PANEL_VECS]) {
#pragma GCC      unroll 8
    for (int step = first_step; step < first_step + N_STEPS; step++) {
        for (int t = 0; t < NT; t++) {
            int32_t x; // 4 activations, in each lane
            memcpy(&x, acts[t]->q + 4 * first_lane + 64 * (step % 4) + 16 * (step / 4), sizeof(x));
            for (int v = 0; v < PANEL_VECS; v++) {
                dots[t][v] = _mm512_dpbusd_epi32(dots[t][v], q[step][v], _mm512_set1_epi32(x));
            }
        }
    }
}

// adds TILE_ROWS rows of 256 weights times NT tokens; ib: which 256
template <int N_GROUPS, bool HAS_OFFSET, int NT>
void multiply_bytes(const panel_block<N_GROUPS, HAS_OFFSET> * w, const char * const * acts, int64_t ib, int zero_byte, panel_sums * to) {
    constexpr int N_STEPS = 8 / N_GROUPS;

    const spac_act_q8 * a[NT];
    alignas(64) int32_t begin[NT][16] = {};
    __m512              sums[NT][PANEL_VECS];
    memcpy(sums, to, sizeof(sums));
    for (int t = 0; t < NT; t++) {
        a[t] = (const spac_act_q8 *) acts[t] + ib;
        if (!HAS_OFFSET) {
            begin_sums<N_GROUPS>(*a[t], zero_byte, begin[t]);
        }
    }
    for (int first_lane : FIRST_LANE) {
        for (int ig = 0; ig < N_GROUPS; ig++) {
            const int lane = first_lane + 4 * ig;
            __m512i   dots[NT][PANEL_VECS];
            for (int t = 0; t < NT; t++) {
                for (int v = 0; v < PANEL_VECS; v++) {
                    dots[t][v] = HAS_OFFSET ? _mm512_setzero_si512() : _mm512_set1_epi32(begin[t][lane]);
                }
            }
            add_steps<N_STEPS, NT>(w->q, a, first_lane, ig * N_STEPS, dots);
            for (int t = 0; t < NT; t++) {
                for (int v = 0; v < PANEL_VECS; v++) {
                    const __m512 scale = _mm512_mul_ps(w->scale[ig][v], _mm512_set1_ps(a[t]->d[lane]));
                    sums[t][v]         = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t][v]), scale, sums[t][v]);
                    if constexpr (HAS_OFFSET) {
                        const float sum = N_GROUPS == 1 ? a[t]->s[lane] + a[t]->s[lane + 4] : a[t]->s[lane];
                        sums[t][v]      = _mm512_fnmadd_ps(w->offset[ig][v], _mm512_set1_ps(sum), sums[t][v]);
                    }
                }
            }
        }
        w++;
    }
    memcpy((void *) to, sums, sizeof(sums));
}

template <typename F>
struct byte_tile {
    typedef panel_block_of<F> block;

    static constexpr int           N_BLOCKS = SPAC_BLOCK / 32, N_TOKENS_MIN = 16;
    static constexpr spac_act_form FORM = SPAC_ACT_Q8;

    static void unpack(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, block * to, int vec) {
        unpack_vec<F>(rows, row_bytes, n_rows, n_cols, to, vec);
    }

    template <int NT>
    static void multiply(const block * w, const char * const * acts, int64_t ib, panel_sums * to) {
        multiply_bytes<N_SCALES<F>, ZERO_BYTE<F> == 0, NT>(w, acts, ib, ZERO_BYTE<F>, to);
    }
};

template <typename F>
using tile_of = byte_tile<F>;

} // namespace

#include "panel-table.h"
