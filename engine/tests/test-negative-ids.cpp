// patches/upstream/0001, 0002, 0008: MUL_MAT_ID and ADD_ID skip negative ids, whatever the type, width and number of threads, on
// their own and fused with what follows them; on the CPU, and on every GPU that this build sees. Nothing is read for such an id either:
// around the experts lie bytes that no sum survives, and one of the ids leads a kernel that takes it for an unsigned one, or
// lets it wrap, back to an expert that is there.
#include "check.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>

struct test_case {
    ggml_type type;
    int       n_expert, n_used, n_tokens, n_out;
    double    share; // of experts that are skipped
};

static constexpr int N_IN = 256;

// In 32 bits INT_MIN times an even stride is 0: the first expert, where -1 leads far beyond the end. Vulkan's drivers may give
// zeros for what is read there, as lavapipe does, and so would hide it.
static constexpr int32_t NEGATIVE_IDS[] = { -1, INT_MIN };

// A number that is not one, or infinite, in all types, whatever part of a block it is.
static constexpr int     POISON    = 0xff;
static constexpr int64_t ALIGNMENT = 256; // of views, for every GPU

static std::vector<float> random_floats(size_t n, std::mt19937 & rng) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float>                    values(n);
    for (float & v : values) {
        v = uniform(rng);
    }
    return values;
}

// distinct experts per token
static std::vector<int32_t> random_ids(const test_case & c, std::mt19937 & rng) {
    std::vector<int32_t> ids, all(c.n_expert);
    for (int it = 0; it < c.n_tokens; it++) {
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), rng);
        ids.insert(ids.end(), all.begin(), all.begin() + c.n_used);
    }
    return ids;
}

// [ne0, ne1, n], or [ne0, n] where ne1 is 0: experts in the middle of a tensor, at an offset that GPUs allow
static ggml_tensor * new_experts(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t n) {
    const int64_t bytes    = ggml_row_size(type, ne0) * std::max<int64_t>(ne1, 1);
    const int64_t n_before = ALIGNMENT / std::gcd(ALIGNMENT, bytes);
    const int64_t n_all    = n_before + n + 1;
    if (ne1 == 0) {
        ggml_tensor * all = ggml_new_tensor_2d(ctx, type, ne0, n_all);
        return ggml_view_2d(ctx, all, ne0, n, all->nb[1], n_before * bytes);
    }
    ggml_tensor * all = ggml_new_tensor_3d(ctx, type, ne0, ne1, n_all);
    return ggml_view_3d(ctx, all, ne0, ne1, n, all->nb[1], all->nb[2], n_before * bytes);
}

// CUDA's matrix kernels load what lies behind the last row, times zero: that must be finite
static bool may_read_behind(ggml_backend_t backend) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(ggml_backend_get_device(backend))), "CUDA") == 0;
}

static void poison_around(ggml_backend_t backend, ggml_tensor * experts) {
    ggml_tensor *           all    = experts->view_src;
    const size_t            behind = experts->view_offs + ggml_nbytes(experts), n_bytes = ggml_nbytes(all);
    const std::vector<char> poison(n_bytes, (char) POISON);
    ggml_backend_tensor_set(all, poison.data(), 0, experts->view_offs);
    if (!may_read_behind(backend)) {
        ggml_backend_tensor_set(all, poison.data(), behind, n_bytes - behind);
    }
}

// a few experts over and over: quantising takes most of the time
static void set_weights(ggml_tensor * t, std::mt19937 & rng) {
    const int64_t            n_distinct = std::min<int64_t>(t->ne[2], 5);
    const std::vector<float> values     = random_floats(n_distinct * t->ne[0] * t->ne[1], rng);
    std::vector<char>        bytes(n_distinct * t->nb[2]);
    ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, n_distinct * t->ne[1], t->ne[0], nullptr);
    for (int64_t ie = 0; ie < t->ne[2]; ie += n_distinct) {
        ggml_backend_tensor_set(t, bytes.data(), ie * t->nb[2], std::min(n_distinct, t->ne[2] - ie) * t->nb[2]);
    }
}

// one row of each per (token, expert): [n_out, n_used, n_tokens]
enum output {
    PRODUCT,
    PRODUCT_BIAS, // these three may be fused into one kernel on a GPU
    GLU,
    GLU_BIAS,
    N_OUTPUTS,
};

using graph_result = std::array<std::vector<float>, N_OUTPUTS>;

struct graph_inputs {
    ggml_tensor *up, *gate, *up_b, *gate_b, *x, *ids;
};

static std::array<ggml_tensor *, N_OUTPUTS> build(ggml_context * ctx, const graph_inputs & in) {
    const auto mul      = [&](ggml_tensor * w) { return ggml_mul_mat_id(ctx, w, in.x, in.ids); };
    const auto mul_bias = [&](ggml_tensor * w, ggml_tensor * b) { return ggml_add_id(ctx, mul(w), b, in.ids); };
    return {
        mul(in.up),
        mul_bias(in.up, in.up_b),
        ggml_swiglu_split(ctx, mul(in.gate), mul(in.up)),
        ggml_swiglu_split(ctx, mul_bias(in.gate, in.gate_b), mul_bias(in.up, in.up_b)),
    };
}

// the same weights, inputs and biases for the same seed; broadcast: one input row per token, as for up and gate
static graph_result compute(ggml_backend_t backend, const test_case & c, bool broadcast, const std::vector<int32_t> & ids) {
    std::mt19937   rng(7);
    ggml_context * ctx = ggml_init({ 40 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });

    const graph_inputs in = {
        new_experts(ctx, c.type, N_IN, c.n_out, c.n_expert),
        new_experts(ctx, c.type, N_IN, c.n_out, c.n_expert),
        new_experts(ctx, GGML_TYPE_F32, c.n_out, 0, c.n_expert),
        new_experts(ctx, GGML_TYPE_F32, c.n_out, 0, c.n_expert),
        ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_IN, broadcast ? 1 : c.n_used, c.n_tokens),
        ggml_new_tensor_2d(ctx, GGML_TYPE_I32, c.n_used, c.n_tokens),
    };
    const auto    outputs = build(ctx, in);
    ggml_cgraph * gf      = ggml_new_graph(ctx);
    for (ggml_tensor * t : outputs) {
        ggml_set_output(t);
        ggml_build_forward_expand(gf, t);
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_buffer_clear(buffer, 0x5a); // what is not written shows

    for (ggml_tensor * t : { in.up, in.gate, in.up_b, in.gate_b }) {
        poison_around(backend, t);
    }
    set_weights(in.up, rng);
    set_weights(in.gate, rng);
    for (ggml_tensor * t : { in.up_b, in.gate_b, in.x }) {
        const std::vector<float> values = random_floats(ggml_nelements(t), rng);
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    }
    ggml_backend_tensor_set(in.ids, ids.data(), 0, ggml_nbytes(in.ids));
    CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS);

    graph_result r;
    for (int o = 0; o < N_OUTPUTS; o++) {
        r[o].resize(ggml_nelements(outputs[o]));
        ggml_backend_tensor_get(outputs[o], r[o].data(), 0, ggml_nbytes(outputs[o]));
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return r;
}

// to the last bit on the CPU; a GPU may take another kernel for another number of rows
static bool agree(const float * a, const float * b, int n, bool exact) {
    const float largest = std::fabs(*std::max_element(b, b + n, [](float x, float y) { return std::fabs(x) < std::fabs(y); }));
    for (int i = 0; i < n; i++) {
        if (exact ? a[i] != b[i] : !(std::fabs(a[i] - b[i]) <= 2e-2f * std::max(1.0f, largest))) {
            return false;
        }
    }
    return true;
}

static bool is_zero(const float * a, int n) {
    return std::all_of(a, a + n, [](float x) { return x == 0.0f; });
}

// ids that are not skipped give the same result, however the others are divided
static void run(ggml_backend_t backend, const test_case & c, unsigned seed) {
    std::mt19937               rng(seed);
    const std::vector<int32_t> all = random_ids(c, rng);

    std::vector<int32_t>             here = all, there = all;
    std::uniform_real_distribution<> uniform(0, 1);
    std::vector<bool>                moved(c.n_expert); // by expert, as a split does it: the rows of an expert stay together
    for (int ie = 0; ie < c.n_expert; ie++) {
        moved[ie] = uniform(rng) < c.share;
    }
    for (size_t i = 0; i < all.size(); i++) {
        (moved[all[i]] ? here : there)[i] = NEGATIVE_IDS[i % std::size(NEGATIVE_IDS)];
    }

    const bool is_cpu = ggml_backend_is_cpu(backend), broadcast = seed % 2 == 0;
    if (is_cpu) {
        ggml_backend_cpu_set_n_threads(backend, 1 + (int) (seed % 3));
    }
    const graph_result stock = compute(backend, c, broadcast, all);
    const graph_result a = compute(backend, c, broadcast, here), b = compute(backend, c, broadcast, there);
    for (size_t i = 0; i < all.size(); i++) {
        for (int o = 0; o < N_OUTPUTS; o++) {
            const size_t at  = i * c.n_out;
            const auto & on  = here[i] < 0 ? b : a;
            const auto & off = here[i] < 0 ? a : b;
            CHECK(agree(&on[o][at], &stock[o][at], c.n_out, is_cpu));
            CHECK(is_zero(&off[o][at], c.n_out));
        }
    }
}

static std::vector<test_case> cases_of(ggml_type type) {
    std::vector<test_case> cases;
    for (int n_tokens : { 1, 2, 5, 16 }) {
        for (double share : { 0.0, 0.4, 1.0 }) {
            cases.push_back({ type, 8, 3, n_tokens, 64, share });
        }
    }
    // on CUDA: rows not a multiple of 32 have no matrix kernel for floats; 8 and 6 of many; more than one tile
    cases.push_back({ type, 8, 3, 5, 48, 0.4 });
    cases.push_back({ type, 8, 3, 16, 48, 0.4 });
    cases.push_back({ type, 128, 8, 5, 64, 0.4 });
    cases.push_back({ type, 128, 8, 64, 64, 0.4 });
    cases.push_back({ type, 16, 6, 9, 64, 0.6 });
    if (type == GGML_TYPE_Q8_0) {
        cases.push_back({ type, 2000, 4, 9, 64, 0.5 }); // a pool of many slots
    }
    return cases;
}

static constexpr ggml_type TYPES[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_K,
                                       GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4 };

static int run_all(ggml_backend_dev_t device, const std::set<std::string> & types) {
    int            n_run   = 0;
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    CHECK(backend);
    for (ggml_type type : TYPES) {
        for (const test_case & c : cases_of(type)) {
            if (types.empty() || types.count(ggml_type_name(type))) {
                run(backend, c, n_run++);
            }
        }
    }
    ggml_backend_free(backend);
    return n_run;
}

// test-negative-ids [DEVICE] [TYPE...]: all that there are unless named
int main(int argc, char ** argv) {
    ggml_backend_load_all();
    const std::string           only = argc > 1 ? argv[1] : "";
    const std::set<std::string> types(argv + std::min(argc, 2), argv + argc);

    int n_run = 0;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (only.empty() || only == ggml_backend_dev_name(device)) {
            const int n = run_all(device, types);
            printf("%s: %d cases\n", ggml_backend_dev_name(device), n);
            n_run += n;
        }
    }
    if (n_run == 0) {
        fprintf(stderr, "no such device or type; types:");
        for (ggml_type type : TYPES) {
            fprintf(stderr, " %s", ggml_type_name(type));
        }
        fprintf(stderr, "\n");
    }
    return n_run > 0 ? 0 : 2;
}
