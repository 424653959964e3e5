// Panels of bf16 for tiles of 16 x 16 sums (AMX): weights are unpacked to their value, and summed in f32 over a whole row.
// What the processor does is behind `Tiles`, so that a test can put a model in its place (test-tiles.cpp):
//
//   configure(n0, n1)      tiles 0-3: sums, 4 and 5: activations of n0 and n1 tokens, 6 and 7: weights of 16 rows
//   zero<T>(), load<T>(from, stride), dot<C, A, B>(), store<T>(to, stride), release()
//
// Included after kernels-256.h, for its formats.
#pragma once

#include "kernels.h"

namespace {

static constexpr int TILE_SIDE = 16; // rows, tokens
static constexpr int TILE_COLS = 32; // columns of one instruction

static_assert(SPAC_PANEL_ROWS == 2 * TILE_SIDE && SPAC_PANEL_TOKENS == 2 * TILE_SIDE, "tiles of 2 x 2");

// 32 columns of 16 rows: line i has columns 2i and 2i + 1 of each row
struct tile_block {
    alignas(64) uint32_t pairs[TILE_COLS / 2][TILE_SIDE];
};

SPAC_INLINE int64_t n_tile_blocks(int64_t n_cols) {
    return (n_cols + TILE_COLS - 1) / TILE_COLS;
}

size_t tile_panel_bytes(int64_t n_cols) {
    return SPAC_PANEL_ROWS / TILE_SIDE * n_tile_blocks(n_cols) * sizeof(tile_block);
}

// ---- unpacking

// 256 columns of 8 rows
struct bf16_rows {
    alignas(64) uint16_t w[8][SPAC_BLOCK];
};

// to the nearest, ties to even; in the upper halves
SPAC_INLINE __m256i round_to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}

template <bool IS_SIGNED>
SPAC_INLINE __m256i bf16_of_8(const uint8_t * q, __m256 scale, __m256 offset) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *) q);
    const __m256  x     = _mm256_cvtepi32_ps(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
    return round_to_bf16(_mm256_fmsub_ps(x, scale, offset));
}

template <typename F>
SPAC_INLINE void values_of_half(const typename F::block * b, int half, uint16_t * to) {
    const half_weights  w = F::unpack(b, half);
    alignas(32) uint8_t q[128];
    alignas(32) float   scale[8], offset[8];
    for (int i = 0; i < 4; i++) {
        _mm256_store_si256((__m256i *) q + i, w.q[i]);
    }
    _mm256_store_ps(scale, w.scale);
    _mm256_store_ps(offset, w.offset);
    for (int ig = 0; ig < 8; ig++) { // groups of 16
        const __m256  s = _mm256_set1_ps(scale[ig / 2 + 4 * (ig % 2)]), o = _mm256_set1_ps(offset[ig / 2 + 4 * (ig % 2)]);
        const __m256i a = bf16_of_8<F::IS_SIGNED>(q + 16 * ig, s, o), b8 = bf16_of_8<F::IS_SIGNED>(q + 16 * ig + 8, s, o);
        _mm256_store_si256((__m256i *) (to + 16 * ig), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b8), 0xD8));
    }
}

// n columns of a row, from column i on; a quantised one
template <typename F>
struct values_of_dot_rows {
    static SPAC_INLINE void get(const char * row, int64_t i, int64_t n, uint16_t * to) {
        typedef typename F::block block;
        constexpr int             N_BLOCKS = SPAC_BLOCK / F::N;

        const block * b = (const block *) row + i / F::N;
        block         rest[N_BLOCKS];
        if (n < SPAC_BLOCK) {
            memset((void *) rest, 0, sizeof(rest));
            memcpy((void *) rest, b, n / F::N * sizeof(block));
            b = rest;
        } else {
            prefetch_ahead(b, N_BLOCKS * sizeof(block));
        }
        values_of_half<F>(b, 0, to);
        values_of_half<F>(b, 1, to + 128);
    }
};

// a row of bf16
template <typename F>
struct values_of_dot_floats {
    static SPAC_INLINE void get(const char * row, int64_t i, int64_t n, uint16_t * to) {
        memset(to, 0, SPAC_BLOCK * sizeof(*to));
        memcpy(to, (const uint16_t *) row + i, n * sizeof(*to));
    }
};

// 8 rows, from row `side` of the tile on; n_rows of them exist, the others are zeros
template <typename V>
void unpack_tile_rows(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, tile_block * to, int side) {
    bf16_rows values;
    memset((void *) &values, 0, sizeof(values));
    for (int64_t i = 0; i < n_cols; i += SPAC_BLOCK) {
        const int64_t n = n_cols - i < SPAC_BLOCK ? n_cols - i : SPAC_BLOCK;
        for (int64_t ir = 0; ir < n_rows; ir++) {
            V::get(rows + ir * row_bytes, i, n, values.w[ir]);
        }
        for (int64_t k = 0; k < n; k += 8) { // four pairs of columns
            __m256i x[4];
            gather_rows((const char *) (values.w[0] + k), sizeof(values.w[0]), x);
            for (int j = 0; j < 4; j++) {
                _mm256_store_si256((__m256i *) &to[(i + k) / TILE_COLS].pairs[k % TILE_COLS / 2 + j][side], x[j]);
            }
        }
    }
}

template <typename V>
void unpack_tiles(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, char * panel) {
    for (int64_t ir = 0; ir < SPAC_PANEL_ROWS; ir += 8) {
        const int64_t n = n_rows <= ir ? 0 : n_rows - ir < 8 ? n_rows - ir
                                                             : 8;
        if (n > 0 || ir % TILE_SIDE) { // a tile without rows is never read
            unpack_tile_rows<V>(rows + ir * row_bytes, row_bytes, n, n_cols, (tile_block *) panel + ir / TILE_SIDE * n_tile_blocks(n_cols), (int) (ir % TILE_SIDE));
        }
    }
}

// ---- multiplying

// the activations are equally far from each other
template <typename Tiles>
void multiply_tiles(const char * panel, int64_t n_rows, int64_t n_cols, const char * const * acts, int n_acts, float * const * out) {
    const int     n0 = n_acts < TILE_SIDE ? n_acts : TILE_SIDE, n1 = n_acts - n0;
    const int64_t n_blocks = n_tile_blocks(n_cols), stride = n_acts > 1 ? acts[1] - acts[0] : 0;
    const bool    has_second = n_rows > TILE_SIDE;

    const tile_block *w0 = (const tile_block *) panel, *w1 = w0 + n_blocks;

    Tiles::configure(n0, n1);
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if (n1) {
        Tiles::template zero<2>();
        Tiles::template zero<3>();
    }
    for (int64_t i = 0; i < n_blocks; i++) {
        Tiles::template load<6>(&w0[i], 64);
        Tiles::template load<4>(acts[0] + 64 * i, stride);
        Tiles::template dot<0, 4, 6>();
        if (has_second) {
            Tiles::template load<7>(&w1[i], 64);
            Tiles::template dot<1, 4, 7>();
        }
        if (n1) {
            Tiles::template load<5>(acts[TILE_SIDE] + 64 * i, stride);
            Tiles::template dot<2, 5, 6>();
            if (has_second) {
                Tiles::template dot<3, 5, 7>();
            }
        }
    }
    alignas(64) float sums[SPAC_PANEL_TOKENS][SPAC_PANEL_ROWS];
    Tiles::template store<0>(&sums[0][0], sizeof(sums[0]));
    Tiles::template store<1>(&sums[0][TILE_SIDE], sizeof(sums[0]));
    if (n1) {
        Tiles::template store<2>(&sums[TILE_SIDE][0], sizeof(sums[0]));
        Tiles::template store<3>(&sums[TILE_SIDE][TILE_SIDE], sizeof(sums[0]));
    }
    Tiles::release();
    for (int t = 0; t < n_acts; t++) {
        memcpy(out[t], sums[t], n_rows * sizeof(float));
    }
}

// ---- one panel per format

// from which width on they are faster was not measured, but follows from a trial's speeds
static constexpr int TILE_TOKENS_MIN = 12;

template <typename V, typename Tiles>
const spac_panel * tile_panel() {
    static const spac_panel panel = { SPAC_ACT_BF16, TILE_TOKENS_MIN, tile_panel_bytes, unpack_tiles<V>, multiply_tiles<Tiles> };
    return &panel;
}

template <typename Tiles>
const spac_panel * find_tile_panel(ggml_type type) {
    if (type == GGML_TYPE_F16) {
        return nullptr; // bf16 would lose three of its bits
    }
    switch (type) {
#define SPAC_CASE(type, kernel, format) \
    case type:                          \
        return tile_panel<values_of_##kernel<format>, Tiles>();
        SPAC_FOR_EACH_FORMAT(SPAC_CASE)
#undef SPAC_CASE
        default:
            return nullptr;
    }
}

} // namespace
