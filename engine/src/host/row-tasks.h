// How the multiplication of a weight matrix is divided: its rows among threads, the tokens among calls of a kernel.
#pragma once

#include "kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#if defined(__unix__)
#    include <unistd.h>
#endif

// Weights that one task reads, at most. Memory takes a moment to come up to speed at the beginning of each: with 128 KiB
// whole decodes of one token took a sixth longer.
static constexpr int64_t SPAC_TASK_BYTES         = 2 << 20;
static constexpr int64_t SPAC_TASK_ROWS_MIN      = 16;
static constexpr int64_t SPAC_TASK_ROWS_MAX      = 1024;
static constexpr int64_t SPAC_N_TASKS_PER_THREAD = 4; // at least, where they do not become too short

// rows of a task, a multiple of SPAC_TASK_ROWS_MIN, where n_matrices of n_rows each are divided into equal tasks
inline int64_t spac_rows_per_task(int64_t n_rows, size_t row_bytes, int64_t n_matrices, int n_threads) {
    const int64_t by_bytes   = SPAC_TASK_BYTES / (int64_t) row_bytes;
    const int64_t by_balance = n_rows * n_matrices / (SPAC_N_TASKS_PER_THREAD * n_threads);
    const int64_t most       = std::clamp(std::min(by_bytes, by_balance), SPAC_TASK_ROWS_MIN, SPAC_TASK_ROWS_MAX);
    const int64_t n_tasks    = (n_rows + most - 1) / most;
    const int64_t rows       = (n_rows + n_tasks - 1) / n_tasks;
    return GGML_PAD(rows, SPAC_TASK_ROWS_MIN);
}

// Divides tokens among calls of a kernel: whole ones and a rest for a panel, whose activations lie in groups; else equal parts.
template <typename F>
inline void spac_for_each_part(int n_tokens, bool in_panels, F f) {
    const int n_most = in_panels ? SPAC_PANEL_TOKENS : SPAC_DOT_TOKENS, n_parts = (n_tokens + n_most - 1) / n_most;
    for (int ip = 0; ip < n_parts; ip++) {
        const int begin = in_panels ? n_most * ip : n_tokens * ip / n_parts, end = in_panels ? begin + n_most : n_tokens * (ip + 1) / n_parts;
        f(begin, std::min(end, n_tokens) - begin);
    }
}

// Bytes of panels that share each reading of the activations: half of the second cache; 512 KiB where its size is unknown.
inline size_t spac_panels_bytes() {
#ifdef _SC_LEVEL2_CACHE_SIZE
    static const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE); // 0 or -1: unknown
#else
    static const long l2 = 0;
#endif
    return l2 > 0 ? l2 / 2 : 512 << 10;
}

// Panels at a time. Many tokens' activations do not fit into the cache beside a panel: each panel of its own would read them again.
inline int64_t spac_n_panels(size_t panel_bytes, int64_t n_tokens) {
    return panel_bytes && n_tokens > SPAC_PANEL_TOKENS ? std::max<int64_t>(1, spac_panels_bytes() / panel_bytes) : 1;
}
