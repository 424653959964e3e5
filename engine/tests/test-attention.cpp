// Attention of wide batches by the engine's kernels, against a reference in double precision and beside ggml's own: sizes of
// heads, heads that share keys, masks, sinks, any number of threads; and what stays ggml's. No model needed.
#include "attention-cases.h"
#include "check.h"
#include "host/attention.h"
#include "host/dense-matmul.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <cstring>

static void set_values(ggml_tensor * t, const floats & values) {
    std::vector<char> bytes(ggml_nbytes(t));
    if (t->type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(values.data(), (ggml_fp16_t *) bytes.data(), (int64_t) values.size());
    } else {
        memcpy(bytes.data(), values.data(), bytes.size());
    }
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

// [n_v, n_heads, n_tokens]; the keys and values of a token lie beside each other, as in a cache
static floats attention(const attention_case & c, const inputs & in, int n_threads, const spac_dense_matmul * marks = nullptr) {
    ggml_context * ctx   = ggml_init({ 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_tensor *  q     = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.n_k, c.n_heads, c.n_tokens);
    ggml_tensor *  k     = ggml_new_tensor_3d(ctx, c.type, c.n_k, c.n_heads_kv, c.n_keys);
    ggml_tensor *  v     = ggml_new_tensor_3d(ctx, c.type, c.n_v, c.n_heads_kv, c.n_keys);
    ggml_tensor *  mask  = c.has_mask ? ggml_new_tensor_2d(ctx, GGML_TYPE_F16, c.n_keys, c.n_tokens) : nullptr;
    ggml_tensor *  sinks = c.has_sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, c.n_heads) : nullptr;
    ggml_tensor *  out   = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), ggml_permute(ctx, k, 0, 2, 1, 3), ggml_permute(ctx, v, 0, 2, 1, 3), mask,
                                               1 / sqrtf((float) c.n_k), c.slope, c.cap);
    ggml_flash_attn_ext_add_sinks(out, sinks);
    ggml_cgraph * gf = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, out);
    if (marks) {
        marks->mark(gf);
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    set_values(q, in.q);
    set_values(k, in.k);
    set_values(v, in.v);
    if (mask) {
        set_values(mask, in.mask);
    }
    if (sinks) {
        set_values(sinks, in.sinks);
    }
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, n_threads);
    CHECK(ggml_backend_graph_compute(cpu, gf) == GGML_STATUS_SUCCESS);

    floats result(ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_free(cpu);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

// two bf16 for a number
static bool is_tiled(const spac_kernels & kernels) {
    return strcmp(kernels.name, "amx") == 0;
}

static void test_case(const spac_kernels & kernels, const attention_case & c) {
    const spac_dense_matmul marks({}, &kernels);
    const inputs            in(c);
    const floats            ggml = attention(c, in, 2), ours = attention(c, in, 1, &marks);
    CHECK((ours != ggml) == c.is_ours);
    for (const int n_threads : { 2, 3, 8 }) {
        CHECK(attention(c, in, n_threads, &marks) == ours);
    }
    if (c.is_ours) {
        const std::vector<double> x = references(c, in), exact = references(c, exact_inputs(c));
        const double              error = error_of(x, ours), error_ggml = error_of(x, ggml), lost = error_of(exact, x);
        printf("%-7s %-20s error %.2e, ggml %.2e, f16 %.2e\n", kernels.name, c.what.c_str(), error, error_ggml, lost);
        CHECK(error <= error_ggml * 1.01 + (is_tiled(kernels) ? lost / 30 : 1e-6));
        CHECK(error_of(exact, ours) <= error_of(exact, ggml) * 1.01);
    }
}

// a token's bits do not depend on who is computed beside it, if the batch is wide
static void test_neighbours(const spac_kernels & kernels) {
    const spac_dense_matmul marks({}, &kernels);
    const attention_case    all = { "", 64, 64, 8, 2, 70, 200 };
    attention_case          few = all;
    few.n_tokens                = 33;
    const inputs in(all);
    inputs       first = in;
    first.q.resize(all.n_k * all.n_heads * few.n_tokens);
    first.mask.resize(all.n_keys * few.n_tokens);
    const floats y = attention(all, in, 2, &marks), z = attention(few, first, 2, &marks);
    CHECK(std::equal(z.begin(), z.end(), y.begin()));
}

// OpenMP may start fewer threads than were planned: they take no more memory
static void test_fewer_threads(const spac_kernels & kernels) {
    ggml_context * ctx = ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true });
    for (int64_t n_tokens = 32; n_tokens < 2000; n_tokens += 31) {
        ggml_tensor * q   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 64, n_tokens, 8);
        ggml_tensor * k   = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 64, 128, 2);
        ggml_tensor * op  = ggml_flash_attn_ext(ctx, q, k, k, nullptr, 1, 0, 0);
        size_t        few = 0;
        for (int n_threads = 1; n_threads <= 16; n_threads++) {
            const size_t size = spac_attention_work_size(kernels, op, n_threads);
            CHECK(size >= few);
            few = size;
        }
        ggml_reset(ctx);
    }
    ggml_free(ctx);
}

// a number that is none is not lost; a query's stays in its row, a key's or value's comes into rows that see it, and perhaps into others of
// their block
static void test_nan(const spac_kernels & kernels) {
    const spac_dense_matmul marks({}, &kernels);
    const attention_case    c = { "", 64, 64, 2, 1, 40, 80 };
    const inputs            in(c);
    inputs                  key = in, value = in, query = in;
    key.k[(c.n_keys - 9) * c.n_k]        = NAN; // seen by the last 6 tokens
    value.v[(c.n_keys - 9) * c.n_v]      = NAN; // its first element
    query.q[(7 * c.n_heads + 1) * c.n_k] = NAN; // token 7, head 1
    const floats y = attention(c, key, 2, &marks), z = attention(c, value, 2, &marks), x = attention(c, query, 2, &marks);
    for (int64_t t = c.n_tokens - 6; t < c.n_tokens; t++) {
        CHECK(std::isnan(y[t * c.n_heads * c.n_v]) && std::isnan(z[t * c.n_heads * c.n_v]) && !std::isnan(z[t * c.n_heads * c.n_v + 1]));
    }
    for (int64_t i = 0; i < c.n_tokens * c.n_heads * c.n_v; i++) {
        CHECK(std::isnan(x[i]) == (i / c.n_v == 7 * c.n_heads + 1));
    }
}

// what lies before the window of every token is not multiplied at all
static void test_infinity_before_windows(const spac_kernels & kernels) {
    const spac_dense_matmul marks({}, &kernels);
    const attention_case    c = { "", 64, 64, 2, 1, 40, 300, true, false, 20 };
    inputs                  in(c);
    in.k[0] = in.v[0] = INFINITY;
    for (const float y : attention(c, in, 2, &marks)) {
        CHECK(std::isfinite(y));
    }
}

int main() {
    const attention_case cases[] = {
        { "one key head", 128, 128, 8, 1, 64, 300 },
        { "four key heads", 128, 128, 32, 4, 70, 190 },
        { "no sharing", 64, 64, 4, 4, 33, 64 },
        { "three heads of a key", 80, 80, 6, 2, 40, 129 },
        { "MLA", 576, 512, 16, 1, 32, 70 },
        { "no mask", 64, 64, 4, 2, 50, 77, false },
        { "sinks", 64, 64, 8, 2, 45, 200, true, true },
        { "a window", 64, 64, 8, 2, 90, 400, true, true, 20 },
        { "biases", 96, 96, 4, 2, 40, 100, true, false, INT64_MAX, 1 },
        { "large scores", 128, 128, 8, 1, 70, 700, true, false, INT64_MAX, 0, 0, 0, GGML_TYPE_F16, true, 8 },
        { "larger scores", 64, 64, 4, 2, 64, 300, true, true, INT64_MAX, 1, 0, 0, GGML_TYPE_F16, true, 30 },
        { "few rows", 112, 112, 1, 1, 65, 259 },
        { "keys and values", 192, 128, 6, 2, 67, 200 },
        { "a large head", 256, 256, 4, 2, 66, 150 },
        { "no batch", 64, 64, 4, 2, 31, 70, true, false, INT64_MAX, 0, 0, 0, GGML_TYPE_F16, false },
        { "a slope", 64, 64, 4, 2, 64, 70, true, false, INT64_MAX, 0, 8, 0, GGML_TYPE_F16, false },
        { "a cap", 64, 64, 4, 2, 64, 70, true, false, INT64_MAX, 0, 0, 30, GGML_TYPE_F16, false },
        { "keys of floats", 64, 64, 4, 2, 64, 70, true, false, INT64_MAX, 0, 0, 0, GGML_TYPE_F32, false },
        { "an odd head", 40, 40, 4, 2, 64, 70, true, false, INT64_MAX, 0, 0, 0, GGML_TYPE_F16, false },
    };
    int n = 0;
    for (const spac_kernels * kernels : spac_kernels_here()) {
        if (!kernels->attention) {
            continue;
        }
        for (const attention_case & c : cases) {
            test_case(*kernels, c);
        }
        test_neighbours(*kernels);
        test_fewer_threads(*kernels);
        test_nan(*kernels);
        test_infinity_before_windows(*kernels);
        n++;
    }
    printf("%d sets of kernels tested\n", n);
    return 0;
}
