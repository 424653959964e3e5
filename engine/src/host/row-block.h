// Rows of a weight matrix to be multiplied: as they lie, or unpacked into a panel.
#pragma once

#include "row-tasks.h"

#include <vector>

struct spac_row_block {
    const int64_t r0, n; // rows of the matrix

    // data: of the whole matrix; panel: of spac_panel_for(), NULL: as they lie; memory: of the panel
    spac_row_block(const spac_kernels & kernels, const ggml_tensor * matrix, const char * data, int64_t r0, int64_t n, const spac_panel * panel, char * memory) :
        r0(r0), n(n), kernels(kernels), type(matrix->type), panel(panel), w{ data + r0 * matrix->nb[1], matrix->nb[1], n, matrix->ne[0], memory } {}

    // out[t][r] = row r0 + r . act[t], for any number of activations
    void multiply(const char * const * acts, int n_acts, float * const * out) {
        spac_for_each_part(n_acts, panel, [&](int t0, int n_here) {
            if (panel) {
                panel->multiply(w, acts + t0, n_here, out + t0);
            } else {
                spac_dot_rows(kernels, type, w.rows, w.row_bytes, n, w.n_cols, acts + t0, n_here, out + t0);
            }
        });
    }

  private:
    const spac_kernels &     kernels;
    const ggml_type          type;
    const spac_panel * const panel;
    spac_panel_rows          w;
};

// Rows r0 to end, n_rows to a block, in groups of n_blocks: for each part of the tokens all blocks of a group.
// take(r, n, i): the i-th of its group, rows r .. r + n; multiply(block, first token, number of tokens)
template <typename Take, typename Multiply>
inline void spac_for_each_group(int64_t r0, int64_t end, int64_t n_rows, int64_t n_blocks, int n_tokens, bool in_panels, Take take, Multiply multiply) {
    for (int64_t r = r0; r < end;) {
        std::vector<decltype(take(r, n_rows, 0))> blocks;
        for (int64_t i = 0; r < end && i < n_blocks; i++, r += n_rows) {
            blocks.push_back(take(r, std::min(n_rows, end - r), i));
        }
        spac_for_each_part(n_tokens, in_panels, [&](int begin, int n) {
            for (auto & block : blocks) {
                multiply(block, begin, n);
            }
        });
    }
}
