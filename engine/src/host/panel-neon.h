// Panels in vectors of 128 bits: as in panel-256.h, with 4 rows in the lanes of a vector. An activation's 4 bytes need not be
// spread: the dot product takes them from a lane, and 16 bytes of activations are those of 4 groups. Included by kernels-neon.cpp.
#pragma once

#include "panel-rows.h"

namespace {

static constexpr int VEC_ROWS   = 4;
static constexpr int PANEL_VECS = 2;
static constexpr int TILE_ROWS  = VEC_ROWS * PANEL_VECS;
static constexpr int TILE_ACTS  = 4; // tokens in registers: 8 sums of bytes, 8 of floats

// 32 weights of TILE_ROWS rows
template <int N_GROUPS, bool HAS_OFFSET>
struct panel_block {
    int8x16_t   q[8][PANEL_VECS]; // 4 weights each
    float32x4_t scale[N_GROUPS][PANEL_VECS], offset[HAS_OFFSET ? N_GROUPS : 0][PANEL_VECS];
};

template <typename F>
using panel_block_of = panel_block<N_SCALES<F>, F::HAS_OFFSET>;

struct panel_sums { // of a token
    float32x4_t v[PANEL_VECS];
};

// ---- unpacking

// 4 floats of each of 4 rows, the rows in lanes
SPAC_INLINE void turn_rows(float32x4_t * x) {
    int8x16_t bytes[4];
    memcpy(bytes, x, sizeof(bytes));
    transpose(bytes);
    memcpy((void *) x, bytes, sizeof(bytes));
}

// 64 weights of 4 rows into the 2 blocks at `to`
template <int N_GROUPS, bool HAS_OFFSET>
SPAC_INLINE void interleave_rows(const quarter_weights * rows, panel_block<N_GROUPS, HAS_OFFSET> * to, int vec) {
    float32x4_t scale[4], offset[4];
    for (int i = 0; i < 4; i++) {
        int8x16_t q[4] = { rows[0].q[i], rows[1].q[i], rows[2].q[i], rows[3].q[i] };
        transpose(q);
        for (int j = 0; j < 4; j++) {
            to[i / 2].q[4 * (i % 2) + j][vec] = q[j];
        }
        scale[i]  = rows[i].scale;
        offset[i] = rows[i].offset;
    }
    turn_rows(scale);
    turn_rows(offset);
    for (int ib = 0; ib < 2; ib++) {
        for (int ig = 0; ig < N_GROUPS; ig++) {
            to[ib].scale[ig][vec] = scale[2 * ib + ig];
            if constexpr (HAS_OFFSET) {
                to[ib].offset[ig][vec] = offset[2 * ib + ig];
            }
        }
    }
}

// VEC_ROWS rows, of which n_rows exist; the others are zeros
template <typename F>
void unpack_vec(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, panel_block_of<F> * to, int vec) {
    quarter_weights unpacked[VEC_ROWS];
    memset((void *) unpacked, 0, sizeof(unpacked));
    for (int64_t i = 0; i < n_cols; i += SPAC_BLOCK) {
        typename F::block         rest[VEC_ROWS][SPAC_BLOCK / F::N];
        const typename F::block * blocks[VEC_ROWS];
        for (int64_t ir = 0; ir < n_rows; ir++) {
            blocks[ir] = block_at<F>(rows + ir * row_bytes, i, n_cols, rest[ir], VEC_ROWS * row_bytes); // what comes after these rows
        }
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; quarter++, to += 2) {
            for (int64_t ir = 0; ir < n_rows; ir++) {
                unpacked[ir] = F::unpack(blocks[ir], quarter);
            }
            interleave_rows(unpacked, to, vec);
        }
    }
}

// ---- multiplying

// the sums of N groups of 16 weights, those of the activations from lane LANE of a quarter on
template <int LANE, int N, int NT>
SPAC_INLINE void dot_groups(const int8x16_t (*q)[PANEL_VECS], const int8_t * const * acts, int32x4_t (*dots)[PANEL_VECS]) {
    for (int t = 0; t < NT; t++) {
        for (int v = 0; v < PANEL_VECS; v++) {
            dots[t][v] = vdupq_n_s32(0);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        for (int t = 0; t < NT; t++) {
            const int8x16_t x = vld1q_s8(acts[t] + 16 * i);
            for (int v = 0; v < PANEL_VECS; v++) {
                dots[t][v] = vdotq_laneq_s32(dots[t][v], q[i][v], x, LANE);
                if constexpr (N == 2) {
                    dots[t][v] = vdotq_laneq_s32(dots[t][v], q[4 + i][v], x, LANE + 1);
                }
            }
        }
    }
}

// adds what shares a scale: group ig of a block, or both
template <int LANE, int NT, int N_GROUPS, bool HAS_OFFSET>
SPAC_INLINE void add_groups(const panel_block<N_GROUPS, HAS_OFFSET> & w, const spac_act_q8 * const * acts, int quarter, float32x4_t (*sums)[PANEL_VECS]) {
    constexpr int IG = N_GROUPS == 1 ? 0 : LANE % 2;

    const int8_t * q[NT];
    for (int t = 0; t < NT; t++) {
        q[t] = acts[t]->q + 64 * quarter;
    }
    int32x4_t dots[NT][PANEL_VECS];
    dot_groups<LANE, 2 / N_GROUPS, NT>(w.q + 4 * IG, q, dots);
    for (int t = 0; t < NT; t++) {
        const float *d = acts[t]->d + 4 * quarter + LANE, *s = acts[t]->s + 4 * quarter + LANE;
        for (int v = 0; v < PANEL_VECS; v++) {
            sums[t][v] = vfmaq_f32(sums[t][v], vcvtq_f32_s32(dots[t][v]), vmulq_n_f32(w.scale[IG][v], *d));
            if constexpr (HAS_OFFSET) {
                sums[t][v] = vfmsq_n_f32(sums[t][v], w.offset[IG][v], N_GROUPS == 1 ? s[0] + s[1] : s[0]);
            }
        }
    }
}

// adds TILE_ROWS rows of 256 weights times NT tokens; ib: which 256
template <int N_GROUPS, bool HAS_OFFSET, int NT>
void multiply_bytes(const panel_block<N_GROUPS, HAS_OFFSET> * w, const char * const * acts, int64_t ib, panel_sums * to) {
    const spac_act_q8 * a[NT];
    float32x4_t         sums[NT][PANEL_VECS];
    memcpy(sums, to, sizeof(sums));
    for (int t = 0; t < NT; t++) {
        a[t] = (const spac_act_q8 *) acts[t] + ib;
    }
    for (int quarter = 0; quarter < 4; quarter++, w += 2) {
        add_groups<0, NT>(w[0], a, quarter, sums);
        if constexpr (N_GROUPS == 2) {
            add_groups<1, NT>(w[0], a, quarter, sums);
        }
        add_groups<2, NT>(w[1], a, quarter, sums);
        if constexpr (N_GROUPS == 2) {
            add_groups<3, NT>(w[1], a, quarter, sums);
        }
    }
    memcpy((void *) to, sums, sizeof(sums));
}

template <typename F>
struct tile_of {
    typedef panel_block_of<F> block;

    static constexpr int           N_BLOCKS = SPAC_BLOCK / 32, N_TOKENS_MIN = N_SCALES<F> == 1 ? 16 : 24;
    static constexpr spac_act_form FORM = SPAC_ACT_Q8;

    static void unpack(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, block * to, int vec) {
        unpack_vec<F>(rows, row_bytes, n_rows, n_cols, to, vec);
    }

    template <int NT>
    static void multiply(const block * w, const char * const * acts, int64_t ib, panel_sums * to) {
        multiply_bytes<N_SCALES<F>, F::HAS_OFFSET, NT>(w, acts, ib, to);
    }
};

} // namespace

#include "panel-table.h"
