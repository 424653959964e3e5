// Attention of wide batches by the engine's kernels, against a reference in double precision and beside ggml's own: sizes of
// heads, heads that share keys, masks, sinks, any number of threads; and what stays ggml's. No model needed.
#include "check.h"
#include "host/attention.h"
#include "host/dense-matmul.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

typedef std::vector<float> floats;

struct attention_case {
    std::string what;
    int64_t     n_k, n_v, n_heads, n_heads_kv, n_tokens, n_keys;
    bool        has_mask = true, has_sinks = false;
    int64_t     window = INT64_MAX; // keys that a token sees
    float       bias   = 0;         // of the visible ones
    float       slope = 0, cap = 0;
    ggml_type   type    = GGML_TYPE_F16;
    bool        is_ours = true;
};

static floats random_floats(int64_t n, float size, uint32_t seed) {
    std::mt19937                    rng(seed);
    std::normal_distribution<float> normal(0, size);
    floats                          values(n);
    for (float & v : values) {
        v = normal(rng);
    }
    return values;
}

// [n_keys, n_tokens]: the last token sees the last key but 3, which are empty cells; the first token nothing
static floats mask_of(const attention_case & c) {
    floats mask = random_floats(c.n_keys * c.n_tokens, c.bias, 5);
    for (int64_t t = 0; t < c.n_tokens; t++) {
        const int64_t last = c.n_keys - 3 - c.n_tokens + t;
        for (int64_t k = 0; k < c.n_keys; k++) {
            const bool is_visible  = t > 0 && k <= last && k > last - c.window;
            mask[t * c.n_keys + k] = is_visible ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(mask[t * c.n_keys + k])) : -INFINITY;
        }
    }
    return mask;
}

static void set_values(ggml_tensor * t, const floats & values) {
    std::vector<char> bytes(ggml_nbytes(t));
    if (t->type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(values.data(), (ggml_fp16_t *) bytes.data(), (int64_t) values.size());
    } else {
        memcpy(bytes.data(), values.data(), bytes.size());
    }
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

struct inputs {
    floats q, k, v, mask, sinks;

    explicit inputs(const attention_case & c) :
        q(random_floats(c.n_k * c.n_tokens * c.n_heads, 1, 1)), k(random_floats(c.n_k * c.n_keys * c.n_heads_kv, 1, 2)),
        v(random_floats(c.n_v * c.n_keys * c.n_heads_kv, 1, 3)), mask(mask_of(c)), sinks(random_floats(c.n_heads, 2, 4)) {
        for (floats * x : { &k, &v }) {
            for (float & f : *x) {
                f = c.type == GGML_TYPE_F16 ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(f)) : f;
            }
        }
    }
};

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

// of one token's head
static std::vector<double> reference(const attention_case & c, const inputs & in, int64_t token, int64_t head) {
    const int64_t       head_kv = head / (c.n_heads / c.n_heads_kv);
    std::vector<double> scores(c.n_keys), out(c.n_v, 0.0);
    double              max = c.has_sinks ? in.sinks[head] : -INFINITY, sum = 0;
    for (int64_t key = 0; key < c.n_keys; key++) {
        for (int64_t i = 0; i < c.n_k; i++) {
            scores[key] += (double) in.q[(token * c.n_heads + head) * c.n_k + i] * in.k[(key * c.n_heads_kv + head_kv) * c.n_k + i];
        }
        scores[key] = scores[key] / sqrt((double) c.n_k) + (c.has_mask ? in.mask[token * c.n_keys + key] : 0);
        max         = std::max(max, scores[key]);
    }
    if (max == -INFINITY) {
        return out; // nothing is visible
    }
    sum = c.has_sinks ? exp(in.sinks[head] - max) : 0;
    for (int64_t key = 0; key < c.n_keys; key++) {
        const double p = exp(scores[key] - max);
        sum += p;
        for (int64_t i = 0; i < c.n_v; i++) {
            out[i] += p * in.v[(key * c.n_heads_kv + head_kv) * c.n_v + i];
        }
    }
    for (double & x : out) {
        x /= sum;
    }
    return out;
}

// norm of the difference to double precision, relative to its norm
static double error_of(const attention_case & c, const inputs & in, const floats & y) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < c.n_tokens * c.n_heads; i++) {
        const std::vector<double> x = reference(c, in, i / c.n_heads, i % c.n_heads);
        for (int64_t k = 0; k < c.n_v; k++) {
            difference += (y[i * c.n_v + k] - x[k]) * (y[i * c.n_v + k] - x[k]);
            norm += x[k] * x[k];
        }
    }
    return sqrt(difference / norm);
}

static void test_case(const spac_kernels & kernels, const attention_case & c) {
    const spac_dense_matmul marks({}, &kernels);
    const inputs            in(c);
    const floats            ggml = attention(c, in, 2), ours = attention(c, in, 1, &marks);
    CHECK((ours != ggml) == c.is_ours);
    for (const int n_threads : { 2, 3 }) {
        CHECK(attention(c, in, n_threads, &marks) == ours);
    }
    if (c.is_ours) {
        const double error = error_of(c, in, ours), error_ggml = error_of(c, in, ggml);
        printf("%-7s %-20s error %.2e, ggml %.2e\n", kernels.name, c.what.c_str(), error, error_ggml);
        CHECK(error <= error_ggml * 1.01 + 1e-6);
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

// a number that is none is not lost
static void test_nan(const spac_kernels & kernels) {
    const spac_dense_matmul marks({}, &kernels);
    const attention_case    c = { "", 64, 64, 2, 1, 40, 80 };
    inputs                  in(c);
    in.k[(c.n_keys - 9) * c.n_k] = NAN; // seen by the last 6 tokens
    const floats y               = attention(c, in, 2, &marks);
    for (int64_t t = c.n_tokens - 6; t < c.n_tokens; t++) {
        CHECK(std::isnan(y[t * c.n_heads * c.n_v]));
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
        n++;
    }
    printf("%d sets of kernels tested\n", n);
    return 0;
}
