#include "attention.h"

#include "ggml-cpu/ggml-cpu-impl.h"

#include <algorithm>
#include <cstring>

static constexpr size_t  ALIGNMENT           = 64;
static constexpr size_t  BLOCKS_BYTES        = 512 << 10; // of a call: queries and sums stay in the second cache
static constexpr int64_t N_CALLS_PER_THREAD  = 4;         // at least, where there are as many blocks: later tokens see more
static constexpr int64_t N_ELEMENTS_MULTIPLE = 16;        // of a key or value

static bool is_plain(const ggml_tensor * t, ggml_type type) {
    return t->type == type && t->nb[0] == ggml_type_size(type) && t->ne[3] == 1;
}

bool spac_can_attend(const spac_kernels & kernels, const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    float              params[3]; // scale, largest slope, cap
    memcpy(params, op->op_params, sizeof(params));
    return kernels.attention && q->ne[1] >= SPAC_ATTENTION_TOKENS_MIN && is_plain(q, GGML_TYPE_F32) && is_plain(k, GGML_TYPE_F16) &&
           is_plain(v, GGML_TYPE_F16) && q->ne[2] % k->ne[2] == 0 && v->ne[2] == k->ne[2] && k->ne[0] % N_ELEMENTS_MULTIPLE == 0 &&
           v->ne[0] % N_ELEMENTS_MULTIPLE == 0 && (!mask || (is_plain(mask, GGML_TYPE_F16) && mask->ne[2] == 1)) && params[1] == 0 && params[2] == 0;
}

// of the heads with the same keys
static int64_t n_blocks_of(const spac_attention & attention, const ggml_tensor * op) {
    const int64_t n_rows = op->src[0]->ne[1] * op->src[0]->ne[2] / op->src[1]->ne[2];
    return (n_rows + attention.n_rows - 1) / attention.n_rows;
}

static int n_blocks_at_most(const spac_attention & attention, const ggml_tensor * op) {
    const size_t bytes = attention.n_rows * (op->src[1]->ne[0] + op->src[2]->ne[0]) * sizeof(float);
    return (int) std::max<int64_t>(1, std::min<int64_t>(attention.n_blocks, BLOCKS_BYTES / bytes));
}

static int n_blocks_per_call(const spac_attention & attention, const ggml_tensor * op, int n_threads) {
    const int64_t fair = n_blocks_of(attention, op) * op->src[1]->ne[2] / (N_CALLS_PER_THREAD * n_threads);
    return (int) std::max<int64_t>(1, std::min<int64_t>(fair, n_blocks_at_most(attention, op)));
}

// whatever the number of threads: OpenMP may start fewer than were planned, each with more blocks
static size_t bytes_of_thread(const spac_attention & attention, const ggml_tensor * op) {
    return GGML_PAD(attention.bytes(op->src[1]->ne[0], op->src[2]->ne[0], n_blocks_at_most(attention, op)), ALIGNMENT);
}

size_t spac_attention_work_size(const spac_kernels & kernels, const ggml_tensor * op, int n_threads) {
    return n_threads * bytes_of_thread(*kernels.attention, op) + ALIGNMENT;
}

// the tokens that see most come first
void spac_attend(const spac_kernels & kernels, const ggml_compute_params & params, const ggml_tensor * op) {
    const spac_attention & attention = *kernels.attention;
    if (params.ith == 0) {
        ggml_threadpool_chunk_set(params.threadpool, params.nth);
    }
    ggml_barrier(params.threadpool);

    char *        memory     = (char *) GGML_PAD((uintptr_t) params.wdata, ALIGNMENT) + params.ith * bytes_of_thread(attention, op);
    const int     n_per_call = n_blocks_per_call(attention, op, params.nth);
    const int64_t n_blocks = n_blocks_of(attention, op), n_heads = op->src[1]->ne[2], n_calls = (n_blocks + n_per_call - 1) / n_per_call;
    for (int64_t i = params.ith; i < n_calls * n_heads; i = ggml_threadpool_chunk_add(params.threadpool, 1)) {
        const int64_t first = (n_calls - 1 - i / n_heads) * n_per_call;
        attention.compute(op, i % n_heads, first * attention.n_rows, (int) std::min<int64_t>(n_per_call, n_blocks - first), memory);
    }
}
