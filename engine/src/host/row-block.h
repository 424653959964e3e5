// Rows of a weight matrix to be multiplied: as they lie, or unpacked into a panel.
#pragma once

#include "row-tasks.h"

struct spac_row_block {
    // panel: of spac_panel_for(), NULL: as they lie; memory: of the panel
    spac_row_block(const spac_kernels & kernels, const ggml_tensor * matrix, const char * rows, int64_t n_rows, const spac_panel * panel, char * memory) :
        kernels(kernels), type(matrix->type), w{ panel, rows, matrix->nb[1], n_rows, matrix->ne[0], memory } {}

    // out[t][r] = row r . act[t], for any number of activations
    void multiply(const char * const * acts, int n_acts, float * const * out) {
        spac_for_each_part(n_acts, w.panel, [&](int t0, int n) {
            if (w.panel) {
                w.panel->multiply(w, acts + t0, n, out + t0);
            } else {
                spac_dot_rows(kernels, type, w.rows, w.row_bytes, w.n_rows, w.n_cols, acts + t0, n, out + t0);
            }
        });
    }

  private:
    const spac_kernels & kernels;
    const ggml_type      type;
    spac_panel_rows      w;
};
