// The panels of one instruction set, a table by format. Included by panel-256.h, panel-512.h and panel-neon.h, which say what a
// tile is:
//
//   VEC_ROWS, PANEL_VECS, TILE_ROWS     rows of a vector, vectors of a tile, their product
//   TILE_ACTS, panel_sums               tokens in registers; the sums of one
//   tile_of<format>                     block, N_BLOCKS (of 256 columns), N_TOKENS_MIN, FORM, unpack(), multiply<n_tokens>()
#pragma once

#include "kernels.h"

namespace {

// blocks of TILE_ROWS rows
template <typename T>
SPAC_INLINE int64_t n_panel_blocks(int64_t n_cols) {
    return (n_cols + SPAC_BLOCK - 1) / SPAC_BLOCK * T::N_BLOCKS;
}

template <typename T>
size_t panel_bytes(int64_t n_cols) {
    return SPAC_PANEL_ROWS / TILE_ROWS * n_panel_blocks<T>(n_cols) * sizeof(typename T::block);
}

template <typename T>
void unpack_panel(spac_panel_rows & w) {
    for (int64_t ir = 0; ir < w.n_rows; ir += VEC_ROWS) {
        const int64_t tile = ir / TILE_ROWS, n = w.n_rows - ir < VEC_ROWS ? w.n_rows - ir : VEC_ROWS;
        auto *        to = (typename T::block *) w.panel + tile * n_panel_blocks<T>(w.n_cols);
        T::unpack(w.rows + ir * w.row_bytes, w.row_bytes, n, w.n_cols, to, (int) (ir % TILE_ROWS / VEC_ROWS));
    }
    w.col = w.n_cols;
}

// NT or fewer tokens
template <typename T, int NT>
SPAC_INLINE void multiply_tile(const typename T::block * w, const char * const * acts, int n_acts, int64_t ib, panel_sums * to) {
    if constexpr (NT > 1) {
        if (n_acts < NT) {
            return multiply_tile<T, NT - 1>(w, acts, n_acts, ib, to);
        }
    }
    T::template multiply<NT>(w, acts, ib, to);
}

static constexpr int PASS_TOKENS = 32; // their sums and 256 columns of their activations stay in the first cache

// at most PASS_TOKENS, 256 columns at a time
template <typename T>
void multiply_part(const char * panel, int64_t n_rows, int64_t n_cols, const char * const * acts, int n_acts, float * const * out) {
    panel_sums sums[SPAC_PANEL_ROWS / TILE_ROWS][PASS_TOKENS];
    memset((void *) sums, 0, sizeof(sums));
    for (int64_t ib = 0; ib * SPAC_BLOCK < n_cols; ib++) {
        for (int64_t r = 0; r < n_rows; r += TILE_ROWS) {
            const typename T::block * w = (const typename T::block *) panel + r / TILE_ROWS * n_panel_blocks<T>(n_cols) + ib * T::N_BLOCKS;
            for (int t = 0; t < n_acts; t += TILE_ACTS) {
                multiply_tile<T, TILE_ACTS>(w, acts + t, n_acts - t, ib, &sums[r / TILE_ROWS][t]);
            }
        }
    }
    for (int t = 0; t < n_acts; t++) {
        for (int64_t r = 0; r < n_rows; r += TILE_ROWS) {
            memcpy(out[t] + r, &sums[r / TILE_ROWS][t], (n_rows - r < TILE_ROWS ? n_rows - r : TILE_ROWS) * sizeof(float));
        }
    }
}

template <typename T>
void multiply_panel(spac_panel_rows & w, const char * const * acts, int n_acts, float * const * out) {
    if (!w.is_unpacked()) {
        unpack_panel<T>(w);
    }
    for (int t = 0; t < n_acts; t += PASS_TOKENS) {
        multiply_part<T>(w.panel, w.n_rows, w.n_cols, acts + t, n_acts - t < PASS_TOKENS ? n_acts - t : PASS_TOKENS, out + t);
    }
}

template <typename F>
const spac_panel * panel_of_dot_rows() {
    typedef tile_of<F>      tile;
    static const spac_panel panel = { tile::FORM, tile::N_TOKENS_MIN, panel_bytes<tile>, multiply_panel<tile> };
    return &panel;
}

// rows of floats: the kernel that reads them as they are has the processor's multiply-adds in use already
template <typename F>
const spac_panel * panel_of_dot_floats() {
    return nullptr;
}

const spac_panel * find_panel(ggml_type type) {
    switch (type) {
#define SPAC_CASE(type, kernel, format) \
    case type:                          \
        return panel_of_##kernel<format>();
        SPAC_FOR_EACH_FORMAT(SPAC_CASE)
#undef SPAC_CASE
        default:
            return nullptr;
    }
}

} // namespace
