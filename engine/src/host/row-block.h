// Rows of a weight matrix, ready to be multiplied: as they lie, or unpacked into a panel.
#pragma once

#include "row-tasks.h"

struct spac_row_block {
    // panel: of spac_panel_for(), NULL: as they lie; memory: of the panel
    spac_row_block(const spac_kernels & kernels, const ggml_tensor * matrix, const char * rows, int64_t n_rows, const spac_panel * panel, char * memory) :
        kernels(kernels), matrix(matrix), rows(rows), n_rows(n_rows), panel(panel), memory(memory) {
        if (panel) {
            panel->unpack(rows, matrix->nb[1], n_rows, matrix->ne[0], memory);
        }
    }

    // out[t][r] = row r . act[t], for any number of activations
    void multiply(const char * const * acts, int n_acts, float * const * out) const {
        if (panel) {
            spac_for_each_part(n_acts, true, [&](int t0, int n) { panel->multiply(memory, n_rows, matrix->ne[0], acts + t0, n, out + t0); });
        } else {
            spac_for_each_part(n_acts, false, [&](int t0, int n) {
                spac_dot_rows(kernels, matrix->type, rows, matrix->nb[1], n_rows, matrix->ne[0], acts + t0, n, out + t0);
            });
        }
    }

  private:
    const spac_kernels &      kernels;
    const ggml_tensor * const matrix;
    const char * const        rows;
    const int64_t             n_rows;
    const spac_panel * const  panel;
    char * const              memory;
};
