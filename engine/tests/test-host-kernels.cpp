// The engine's own kernels against a reference in double precision, beside ggml's: for each format and width, odd sizes,
// experts without tokens, biases, scales, fused gate and up, and any number of threads. No model needed.
#include "base/status.h"
#include "check.h"
#include "host/blocks.h"
#include "host/host-experts.h"
#include "host/kernel-worker.h"
#include "kernel-types.h"
#include "layers/expert-ffn.h"
#include "random-blocks.h"

#include "llama-graph.h" // llm_ffn_op_type

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>

static std::vector<ggml_type> with_floats() {
    std::vector<ggml_type> types = QUANTISED;
    types.insert(types.end(), { GGML_TYPE_F16, GGML_TYPE_BF16 });
    return types;
}

static const std::vector<ggml_type> TYPES = with_floats();

struct layer_shape {
    const char * what;
    ggml_type    up, gate, down;
    int64_t      n_embd, n_ff;
    int          op               = LLM_FFN_SILU;
    bool         is_fused         = false; // gate and up in one tensor
    bool         has_gate         = true;
    bool         has_bias         = false;
    bool         has_scale        = false;
    bool         weight_first     = false;
    float        clamp            = 0; // of SwiGLU, in two forms
    bool         clamps_in_one_op = false;
};

static constexpr int N_EXPERT = 11, N_USED = 3;

static void fill(ggml_tensor * t, std::mt19937 & rng, float size) {
    if (has_random_blocks(t->type)) {
        const std::vector<char> bytes = random_blocks(t->type, ggml_nelements(t), size, rng);
        ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
        return;
    }
    std::normal_distribution<float> normal(0, size);
    std::vector<float>              values(ggml_nelements(t));
    for (float & v : values) {
        v = normal(rng);
    }
    std::vector<char> bytes(ggml_nbytes(t));
    ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

// what a tensor holds, as floats
static std::vector<float> floats_of(const ggml_tensor * t) {
    std::vector<float> values(ggml_nelements(t));
    if (t->type == GGML_TYPE_F32) {
        memcpy(values.data(), t->data, ggml_nbytes(t));
    } else {
        ggml_get_type_traits(t->type)->to_float(t->data, values.data(), values.size());
    }
    return values;
}

struct layer_fixture {
    spac_moe_layer        layer;
    ggml_context *        ctx = ggml_init({ 16 * ggml_tensor_overhead(), nullptr, true });
    ggml_backend_buffer_t buffer;

    std::vector<float> parts[SPAC_N_PARTS], up_s, gate_s, down_s; // for the reference

    explicit layer_fixture(const layer_shape & shape) {
        layer.il                = 0;
        layer.n_embd            = shape.n_embd;
        layer.n_expert          = N_EXPERT;
        layer.n_expert_used     = N_USED;
        layer.op                = shape.op;
        layer.group             = 0;
        layer.weight_before_ffn = shape.weight_first;
        layer.clamp             = shape.clamp;
        layer.clamps_in_one_op  = shape.clamps_in_one_op;
        add_weights(shape);
        if (shape.has_bias) {
            add_biases();
        }
        if (shape.has_scale) {
            layer.up_s   = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, N_EXPERT);
            layer.gate_s = layer.parts[SPAC_PART_GATE] ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, N_EXPERT) : nullptr;
            layer.down_s = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, N_EXPERT);
        }
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());

        std::mt19937 rng(3);
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            fill(t, rng, t->ne[2] > 1 ? 1.0f / sqrtf((float) t->ne[0]) : 0.7f);
        }
        keep_floats();
    }

    ~layer_fixture() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    void add_weights(const layer_shape & shape) {
        const auto add = [&](spac_part part, ggml_type type, int64_t n_cols, int64_t n_rows) {
            layer.parts[part] = ggml_new_tensor_3d(ctx, type, n_cols, n_rows, N_EXPERT);
        };
        if (shape.is_fused) {
            add(SPAC_PART_GATE_UP, shape.up, shape.n_embd, 2 * shape.n_ff);
        } else {
            add(SPAC_PART_UP, shape.up, shape.n_embd, shape.n_ff);
            if (shape.has_gate) {
                add(SPAC_PART_GATE, shape.gate, shape.n_embd, shape.n_ff);
            }
        }
        add(SPAC_PART_DOWN, shape.down, shape.n_ff, shape.n_embd);
    }

    void add_biases() {
        for (int part = SPAC_PART_UP; part <= SPAC_PART_GATE_UP; part++) {
            if (layer.parts[part]) {
                layer.parts[part + SPAC_PART_UP_B] = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, layer.parts[part]->ne[1], N_EXPERT);
            }
        }
    }

    void keep_floats() {
        for (int part = 0; part < SPAC_N_PARTS; part++) {
            if (layer.parts[part]) {
                parts[part] = floats_of(layer.parts[part]);
            }
        }
        up_s   = layer.up_s ? floats_of(layer.up_s) : up_s;
        gate_s = layer.gate_s ? floats_of(layer.gate_s) : gate_s;
        down_s = layer.down_s ? floats_of(layer.down_s) : down_s;
    }
};

// ---- the reference

static double silu(const spac_moe_layer & layer, double x) {
    if (layer.clamp == 0) {
        return x / (1 + exp(-x));
    }
    x = layer.clamps_in_one_op ? std::min(x, (double) layer.clamp) : x;
    return std::min(x / (1 + exp(-x)), (double) layer.clamp);
}

static double activated(const spac_moe_layer & layer, double x) {
    switch (layer.op) {
        case LLM_FFN_SILU:
            return silu(layer, x);
        case LLM_FFN_GELU:
            return 0.5 * x * (1 + tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)));
        case LLM_FFN_RELU:
            return std::max(x, 0.0);
        case LLM_FFN_RELU_SQR:
            return x > 0 ? x * x : 0;
        default:
            return std::min(x, 7.0) / (1 + exp(-1.702 * std::min(x, 7.0)));
    }
}

// in eight sums, none of which waits for another: most of this test's time is spent here
static double dot_of(const float * w, const double * x, int64_t n) {
    double  sums[8] = {};
    int64_t i       = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++) {
            sums[j] += (double) w[i + j] * x[i + j];
        }
    }
    for (; i < n; i++) {
        sums[0] += (double) w[i] * x[i];
    }
    return std::accumulate(sums, sums + 8, 0.0);
}

// row ir of an expert's part, times x; with scale and bias
static double project(const layer_fixture & f, int part, const std::vector<float> & scale, int ie, int64_t ir, const double * x) {
    const ggml_tensor * t   = f.layer.parts[part];
    double              sum = dot_of(&f.parts[part][(ie * t->ne[1] + ir) * t->ne[0]], x, t->ne[0]);
    sum *= scale.empty() ? 1 : scale[ie];
    const ggml_tensor * b = f.layer.parts[part + SPAC_PART_UP_B];
    return b ? sum + f.parts[part + SPAC_PART_UP_B][ie * b->ne[0] + ir] : sum;
}

static std::vector<double> expert_of(const layer_fixture & f, int ie, const std::vector<double> & x) {
    const spac_moe_layer & layer    = f.layer;
    const int64_t          n_ff     = layer.parts[SPAC_PART_DOWN]->ne[0];
    const bool             is_fused = layer.parts[SPAC_PART_GATE_UP], has_gate = is_fused || layer.parts[SPAC_PART_GATE];

    std::vector<double> hidden(n_ff), y(layer.n_embd);
    for (int64_t i = 0; i < n_ff; i++) {
        double up = is_fused ? project(f, SPAC_PART_GATE_UP, f.up_s, ie, n_ff + i, x.data()) : project(f, SPAC_PART_UP, f.up_s, ie, i, x.data());
        if (!has_gate) {
            hidden[i] = activated(layer, up);
            continue;
        }
        const double gate  = is_fused ? project(f, SPAC_PART_GATE_UP, f.up_s, ie, i, x.data()) : project(f, SPAC_PART_GATE, f.gate_s, ie, i, x.data());
        const double limit = layer.op == LLM_FFN_SWIGLU_OAI_MOE ? 7 : layer.clamp;
        up                 = limit > 0 ? std::max(-limit, std::min(up, limit)) : up;
        up += layer.op == LLM_FFN_SWIGLU_OAI_MOE;
        hidden[i] = activated(layer, gate) * up;
    }
    for (int64_t i = 0; i < layer.n_embd; i++) {
        y[i] = project(f, SPAC_PART_DOWN, f.down_s, ie, i, hidden.data());
    }
    return y;
}

struct forward_input {
    int                  n_tokens, n_inputs; // inputs per token: 1 or N_USED
    std::vector<float>   cur;
    std::vector<int32_t> ids; // -1: not here
};

static forward_input random_input(const layer_fixture & f, int n_tokens, std::mt19937 & rng) {
    forward_input                   in = { n_tokens, f.layer.weight_before_ffn ? N_USED : 1, {}, {} };
    std::normal_distribution<float> normal(0, 1);
    for (int64_t i = 0; i < f.layer.n_embd * in.n_inputs * n_tokens; i++) {
        in.cur.push_back(normal(rng) * (rng() % 40 == 0 ? 6.0f : 1.0f)); // some outliers, as in models
    }
    for (int it = 0; it < n_tokens; it++) {
        std::vector<int32_t> all(N_EXPERT - 2); // the last two never have tokens
        for (size_t ie = 0; ie < all.size(); ie++) {
            all[ie] = (int32_t) ie;
        }
        std::shuffle(all.begin(), all.end(), rng);
        for (int iu = 0; iu < N_USED; iu++) {
            in.ids.push_back(rng() % 4 == 0 ? -1 : all[iu]);
        }
    }
    return in;
}

static std::vector<double> reference(const layer_fixture & f, const forward_input & in) {
    std::vector<double> rows;
    for (size_t i = 0; i < in.ids.size(); i++) {
        const float *             x = &in.cur[(in.n_inputs == 1 ? i / N_USED : i) * f.layer.n_embd];
        const std::vector<double> y = in.ids[i] < 0 ? std::vector<double>(f.layer.n_embd) : expert_of(f, in.ids[i], { x, x + f.layer.n_embd });
        rows.insert(rows.end(), y.begin(), y.end());
    }
    return rows;
}

static std::vector<float> with_ggml(const layer_fixture & f, const forward_input & in) {
    ggml_context * ctx  = ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_tensor *  cur  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, f.layer.n_embd, in.n_inputs, in.n_tokens);
    ggml_tensor *  ids  = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, N_USED, in.n_tokens);
    ggml_tensor *  zero = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, N_USED, in.n_tokens); // ids to gather scales by: none negative
    ggml_tensor *  rows = spac_build_expert_ffn({ ctx, &f.layer, f.layer.parts, cur, ids, spac_gather_scale(ctx, f.layer.up_s, zero),
                                                  spac_gather_scale(ctx, f.layer.gate_s, zero), spac_gather_scale(ctx, f.layer.down_s, zero) });
    ggml_cgraph *  gf   = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, rows);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());

    std::vector<int32_t> not_negative = in.ids;
    for (int32_t & id : not_negative) {
        id = std::max(id, 0);
    }
    ggml_backend_tensor_set(cur, in.cur.data(), 0, ggml_nbytes(cur));
    ggml_backend_tensor_set(ids, in.ids.data(), 0, ggml_nbytes(ids));
    ggml_backend_tensor_set(zero, not_negative.data(), 0, ggml_nbytes(zero));
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, 1);
    CHECK(ggml_backend_graph_compute(cpu, gf) == GGML_STATUS_SUCCESS);

    std::vector<float> result(ggml_nelements(rows));
    ggml_backend_tensor_get(rows, result.data(), 0, ggml_nbytes(rows));
    ggml_backend_free(cpu);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

static std::vector<float> with_kernels(spac_host_experts & experts, const layer_fixture & f, const forward_input & in, int n_threads) {
    std::vector<float>    rows(in.ids.size() * f.layer.n_embd);
    const size_t          nb    = f.layer.n_embd * sizeof(float);
    const spac_host_input input = { (const char *) in.cur.data(), nb, nb * in.n_inputs };

    experts.plan(f.layer, in.ids.data(), in.n_tokens, n_threads);
    std::vector<std::thread> threads;
    for (int i = 1; i < n_threads; i++) {
        threads.emplace_back([&] { experts.work(input, rows.data()); });
    }
    experts.work(input, rows.data());
    for (std::thread & t : threads) {
        t.join();
    }
    return rows;
}

// sum of squares of the differences where an expert was at work; elsewhere both must be zero
static double error_of(const std::vector<float> & rows, const std::vector<double> & expected) {
    CHECK(rows.size() == expected.size());
    double sum = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        CHECK(std::isfinite(rows[i]));
        sum += (rows[i] - expected[i]) * (rows[i] - expected[i]);
    }
    return sum;
}

static double norm_of(const std::vector<double> & x) {
    double sum = 0;
    for (double v : x) {
        sum += v * v;
    }
    return sum;
}

// ---- tests

// not row by row: two roundings of the same input differ by chance
#ifdef SPAC_FEW_WIDTHS // a sanitizer looks at memory and threads, ten times as slowly: few draws, which chance moves
static constexpr double TOLERANCE = 1.1;
static constexpr int    N_DRAWS   = 8;
#else
static constexpr double TOLERANCE = 1.01;
static constexpr int    N_DRAWS   = 160;
#endif

static void test_exact(const spac_kernels & kernels, const layer_fixture & f, const char * what, const std::vector<int> & widths) {
    CHECK(spac_host_experts::can_compute(kernels, f.layer, true));

    std::mt19937      rng(11);
    spac_host_experts experts(kernels);
    double            ours = 0, ggmls = 0; // sums over the draws, each relative to its own output: a few of those are large
    for (int n_tokens : widths) {
        const forward_input       in       = random_input(f, n_tokens, rng);
        const std::vector<double> expected = reference(f, in);
        const std::vector<float>  rows     = with_kernels(experts, f, in, 1 + n_tokens % 3);
        const double              size     = std::max(norm_of(expected), 1e-30); // all of a token's experts may be elsewhere
        ours += error_of(rows, expected) / size;
        ggmls += error_of(with_ggml(f, in), expected) / size;
        for (int n_threads : { 1, 2, 3 }) { // the division of the work does not change a bit
            CHECK(rows == with_kernels(experts, f, in, n_threads));
        }
    }
    ours  = sqrt(ours / widths.size());
    ggmls = sqrt(ggmls / widths.size());
    printf("%-7s %-28s error %.3e, ggml %.3e\n", kernels.name, what, ours, ggmls);
    CHECK(ours <= ggmls * TOLERANCE + 1e-6);
}

static void test_exact(const spac_kernels & kernels, const layer_shape & shape, const std::vector<int> & widths) {
    test_exact(kernels, layer_fixture(shape), shape.what, widths);
}

static int64_t block_of(ggml_type type) {
    return ggml_blck_size(type);
}

// every format, in the plainest layer; sizes that are no multiple of 256 where the format allows
// arithmetic does not race: under ThreadSanitizer, where starting threads is slow, two widths show what there is to see; and on
// an emulator
#if defined(__SANITIZE_THREAD__) || defined(SPAC_EMULATED)
static const std::vector<int> WIDTHS = { 3, 130 };
#elif defined(SPAC_FEW_WIDTHS)
static const std::vector<int> WIDTHS = { 1, 9, 130 };
#else
static const std::vector<int> WIDTHS = { 1, 2, 3, 5, 9, 16, 40, 130 }; // the last: 30 rows per expert
#endif

static void test_formats(const spac_kernels & kernels) {
    for (ggml_type type : TYPES) {
        const int64_t       block  = block_of(type);
        const int64_t       n_embd = block == 256 ? 512 : block == 1 ? 123
                                                                     : 256 + block;
        const int64_t       n_ff   = block == 256 ? 256 : block == 1 ? 77
                                                                     : 3 * block;
        const layer_fixture f({ "", type, type, type, n_embd, n_ff });
        for (int n_tokens : WIDTHS) {
            const std::string what = std::string(ggml_type_name(type)) + ", " + std::to_string(n_tokens) + " tokens";
            test_exact(kernels, f, what.c_str(), std::vector<int>(1 + N_DRAWS / n_tokens, n_tokens));
        }
    }
}

// a matrix of random weights that is deleted with it
struct random_matrix {
    const int64_t                                       n_cols, n_rows;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx;
    ggml_tensor *                                       w;

    random_matrix(ggml_type type, int64_t n_cols, int64_t n_rows) :
        n_cols(n_cols), n_rows(n_rows), ctx(ggml_init({ 2 * n_rows * n_cols * sizeof(float) + 4096, nullptr, false }), ggml_free) {
        w = ggml_new_tensor_2d(ctx.get(), type, n_cols, n_rows);
        std::mt19937 rng(13);
        if (has_random_blocks(type)) {
            const std::vector<char> bytes = random_blocks(type, n_rows * n_cols, 1, rng);
            memcpy(w->data, bytes.data(), bytes.size());
            return;
        }
        std::vector<float> x(n_rows * n_cols);
        for (float & v : x) {
            v = std::normal_distribution<float>(0, 1)(rng);
        }
        ggml_quantize_chunk(type, x.data(), w->data, 0, n_rows, n_cols, nullptr);
    }

    // all rows times x: by the panel, or, where it is NULL, as they lie
    std::vector<float> times(const spac_kernels & kernels, const spac_panel * panel, const std::vector<float> & x) const {
        const spac_act_form form = panel ? panel->form : SPAC_ACT_Q8;
        aligned             act(spac_act_bytes(form, n_cols) * spac_act_group(form)), memory(panel ? panel->bytes(n_cols) : 64);
        const char *        acts[]   = { act.p };
        const float *       inputs[] = { x.data() };
        std::vector<float>  y(n_rows);
        spac_prepare_acts(kernels, form, inputs, 1, n_cols, act.p);
        for (int64_t r = 0; r < n_rows; r += SPAC_PANEL_ROWS) {
            float *        out[] = { y.data() + r };
            spac_row_block rows(kernels, w, (const char *) w->data, r, std::min<int64_t>(SPAC_PANEL_ROWS, n_rows - r), panel, memory.p);
            rows.multiply(acts, 1, out);
        }
        return y;
    }

  private:
    struct aligned {
        char * p;
        explicit aligned(size_t n) :
            p((char *) aligned_alloc(64, GGML_PAD(n, 64))) {}
        ~aligned() { free(p); }
    };
};

// of one weight, relative to the largest
static float tolerance_of(spac_act_form form) {
    return form == SPAC_ACT_BF16 ? 1.0f / 256 : form == SPAC_ACT_I16 ? 1.5f / 2048
                                                                     : 2e-6f;
}

// each weight of a row comes out of a token that has only its column; a number that is none, or infinite, does not get lost
static void test_every_weight(const spac_kernels & kernels) {
    for (ggml_type type : TYPES) {
        if (!ggml_is_quantized(type)) {
            continue;
        }
        const random_matrix      m(type, block_of(type) == 256 ? 1024 : 256 + block_of(type), 33);
        const std::vector<float> expected = floats_of(m.w);
        const float              largest  = *std::max_element(expected.begin(), expected.end(), [](float a, float b) { return fabsf(a) < fabsf(b); });
        for (const spac_panel * panel : { (const spac_panel *) nullptr, spac_panel_for(kernels, type, 100) }) {
            const float tolerance = tolerance_of(panel ? panel->form : SPAC_ACT_Q8) * fabsf(largest);
            for (int64_t ic = 0; ic < m.n_cols; ic += panel ? 5 : 1) {
                std::vector<float> x(m.n_cols);
                x[ic]                      = 1;
                const std::vector<float> y = m.times(kernels, panel, x);
                for (int64_t ir = 0; ir < m.n_rows; ir++) {
                    CHECK(fabsf(y[ir] - expected[ir * m.n_cols + ic]) <= tolerance);
                }
            }
            for (float bad : { NAN, INFINITY }) {
                std::vector<float> x(m.n_cols, 1);
                x[m.n_cols - 1] = bad;
                for (float y : m.times(kernels, panel, x)) {
                    CHECK(!std::isfinite(y));
                }
            }
        }
    }
}

// sums of the largest bytes there are stay exact
static void test_largest(const spac_kernels & kernels) {
    const random_matrix m(GGML_TYPE_Q8_0, 512, 32);
    spac_block_q8_0 *   blocks = (spac_block_q8_0 *) m.w->data;
    for (int64_t i = 0; i < m.n_rows * m.n_cols / 32; i++) {
        blocks[i].d = 0x3c00; // 1
        memset(blocks[i].q, -128, sizeof(blocks[i].q));
    }
    for (float sign : { 1.0f, -1.0f }) {
        for (float y : m.times(kernels, spac_panel_for(kernels, GGML_TYPE_Q8_0, 100), std::vector<float>(m.n_cols, sign))) {
            CHECK(fabsf(y + sign * 128 * 512) < 0.1f);
        }
    }
}

static void test_layers(const spac_kernels & kernels) {
    const ggml_type Q8 = GGML_TYPE_Q8_0, Q4 = GGML_TYPE_Q4_0, MX = GGML_TYPE_MXFP4, F16 = GGML_TYPE_F16;

    layer_shape oss   = { "gpt-oss: fused, biases", MX, MX, MX, 96, 160, LLM_FFN_SWIGLU_OAI_MOE, true };
    oss.has_bias      = true;
    layer_shape mixed = { "mixed types, scales, biases", Q8, F16, Q4, 64, 96 };
    mixed.has_bias = mixed.has_scale = true;
    layer_shape fused                = { "fused, scales", Q4, Q4, GGML_TYPE_BF16, 320, 45 };
    fused.is_fused = fused.has_scale = true;
    layer_shape first                = { "weights first", Q8, Q8, Q8, 64, 32 };
    first.weight_first               = true;
    layer_shape plain                = { "no gate, squared ReLU", Q8, Q8, Q8, 96, 64, LLM_FFN_RELU_SQR };
    plain.has_gate                   = false;
    layer_shape silu                 = { "no gate, SiLU", Q8, Q8, Q8, 96, 64 };
    silu.has_gate                    = false;
    layer_shape clamp_1              = { "SwiGLU clamped before", Q8, Q8, Q8, 96, 64 };
    clamp_1.clamp                    = 0.5f;
    clamp_1.clamps_in_one_op         = true;
    layer_shape clamp_2              = { "SwiGLU clamped after", Q8, Q8, Q8, 96, 64 };
    clamp_2.clamp                    = 0.5f;
    const layer_shape gelu           = { "GELU", Q8, Q8, Q8, 96, 64, LLM_FFN_GELU };
    const layer_shape relu           = { "ReLU", Q8, Q8, Q8, 96, 64, LLM_FFN_RELU };
    const layer_shape wide           = { "panels for up and down", GGML_TYPE_Q4_0, Q8, GGML_TYPE_Q5_1, 96, 64 };
    const layer_shape big            = { "many tasks", Q8, Q8, GGML_TYPE_Q6_K, 1056, 768 };

    for (const layer_shape & shape : { oss, mixed, fused, first, plain, silu, clamp_1, clamp_2, gelu, relu, wide }) {
        test_exact(kernels, shape, { 1, 4, 9, 17, 2, 1, 60, 130 });
    }
    test_exact(kernels, big, { 1, 3 });
    for (const layer_shape & shape : { oss, mixed, wide }) { // groups of panels: more rows per expert than one call takes
        test_exact(kernels, shape, { 400 });
    }
}

// what the kernels must survive: no work at all, inputs of zero, infinities of the exponential
static void test_edges(const spac_kernels & kernels) {
    const layer_fixture f({ "", GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 64, 32 });
    spac_host_experts   experts(kernels);
    std::mt19937        rng(1);

    forward_input in = random_input(f, 3, rng);
    std::fill(in.ids.begin(), in.ids.end(), -1);
    CHECK(with_kernels(experts, f, in, 2) == std::vector<float>(in.ids.size() * f.layer.n_embd));

    in = random_input(f, 3, rng);
    std::fill(in.cur.begin(), in.cur.end(), 0.0f);
    CHECK(with_kernels(experts, f, in, 2) == std::vector<float>(in.ids.size() * f.layer.n_embd));

    std::vector<float> x = { -1e30f, -200, -100, -88, -20, -1, -1e-30f, 0, 1e-30f, 1, 20, 88, 100, 200, 1e30f, 3, -3 };
    std::vector<float> y = x;
    kernels.swish(y.data(), (int64_t) y.size(), 1.0f);
    for (size_t i = 0; i < x.size(); i++) {
        const double expected = x[i] / (1 + exp(-(double) x[i]));
        CHECK(fabs(y[i] - expected) <= 4e-7 * fabs(expected) + 1e-37);
    }
}

static ggml_tensor input_tensor(const layer_fixture & f, forward_input & in) {
    ggml_tensor cur = {};
    cur.ne[0]       = f.layer.n_embd;
    cur.ne[1]       = in.n_inputs;
    cur.ne[2]       = in.n_tokens;
    cur.nb[1]       = f.layer.n_embd * sizeof(float);
    cur.nb[2]       = cur.nb[1] * in.n_inputs;
    cur.data        = in.cur.data();
    return cur;
}

// the same rows as without the worker, layer after layer, with and without work, also with more threads than cores; the
// threads meet twice per layer with work, and never else
static void test_worker(const spac_kernels & kernels, bool stays_awake) {
    const layer_fixture f({ "", GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, 64, 96 });
    spac_host_experts   experts(kernels);
    std::mt19937        rng(5);

    for (int n_threads : { 1, 3, 8 }) {
        spac_kernel_worker worker(kernels, n_threads, stays_awake, std::vector<int>());
        uint64_t           n_rounds = 0;
        for (int i = 0; i < 200; i++) {
            forward_input in = random_input(f, 1 + i % 9, rng);
            if (i % 7 == 0) {
                std::fill(in.ids.begin(), in.ids.end(), -1);
            }
            n_rounds += std::any_of(in.ids.begin(), in.ids.end(), [](int32_t id) { return id >= 0; });
            const std::vector<float> rows = with_kernels(experts, f, in, 1);

            const ggml_tensor cur = input_tensor(f, in);
            worker.submit(&f.layer, &cur, in.ids.data(), in.ids.data(), in.n_tokens);
            std::fill(in.cur.begin(), in.cur.end(), NAN); // submit has copied what it needs
            if (i % 11 == 0) {                            // an aborted graph, which collects nothing
                continue;
            }
            if (i % 5 == 0) {
                worker.rest();
            }
            uint64_t us;
            CHECK(memcmp(worker.wait(us), rows.data(), rows.size() * sizeof(float)) == 0);
            CHECK(worker.n_switches() == 2 * n_rounds);
        }
    }
}

// the time that host experts took is not the time until somebody asked for them
static void test_worker_time(const spac_kernels & kernels) {
    const layer_fixture f({ "", GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, 64, 96 });
    std::mt19937        rng(6);
    spac_kernel_worker  worker(kernels, 1, true, std::vector<int>());
    uint64_t            shortest = UINT64_MAX;
    for (int i = 0; i < 5; i++) { // its thread may have to wait for a core
        forward_input     in  = random_input(f, 3, rng);
        const ggml_tensor cur = input_tensor(f, in);
        worker.submit(&f.layer, &cur, in.ids.data(), in.ids.data(), in.n_tokens);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        uint64_t us;
        worker.wait(us);
        shortest = std::min(shortest, us);
    }
    CHECK(shortest > 0 && shortest < 50000);
}

// layers that are not ours
static void test_declined(const spac_kernels & kernels) {
    const layer_fixture f({ "", GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, GGML_TYPE_F32, 64, 32 });
    CHECK(!spac_host_experts::can_compute(kernels, f.layer));
}

// what the engine has no kernel for ggml's dot products compute, beside its own, and with their error
static void test_ggml_dots(const spac_kernels & kernels) {
    const layer_shape shape = { "IQ3_S, Q4_K, F32", GGML_TYPE_IQ3_S, GGML_TYPE_Q4_K, GGML_TYPE_F32, 256, 512 };
    CHECK(!spac_host_experts::can_compute(kernels, layer_fixture(shape).layer));
    test_exact(kernels, shape, WIDTHS);
}

// from how many rows per expert on a panel multiplies; 0: never. The rule of docs/host-experts.md.
static int panel_from(const spac_kernels & kernels, ggml_type type) {
    const std::string name = kernels.name;
    if (name == "amx") {
        return type == GGML_TYPE_F16 ? 0 : 16;
    }
    if (name == "avx512") {
        return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ? 0 : 16;
    }
    switch (type) {
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            return 0;
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S:
            return name == "avx2" ? 16 : 24;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_IQ4_XS:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_MXFP4:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
            return 16;
        default:
            return 24;
    }
}

static void test_rule(const spac_kernels & kernels) {
    for (ggml_type type : TYPES) {
        const int from = panel_from(kernels, type);
        for (int n = 1; n < 100; n++) {
            CHECK((spac_panel_for(kernels, type, n) != nullptr) == (from && n >= from));
        }
    }
}

// AVX2 and AVX-VNNI differ in one instruction, which neither rounds nor saturates here; wide batches of 8-bit weights apart,
// which AVX2 multiplies in 16 bits
static void test_same_bits(const spac_kernels & a, const spac_kernels & b) {
    for (ggml_type type : TYPES) {
        const int64_t       block = block_of(type) == 256 ? 512 : 256 + block_of(type);
        const layer_fixture f({ "", type, type, type, block, block });
        std::mt19937        rng(7);
        spac_host_experts   first(a), second(b);
        for (int n_tokens : { 1, 7, 40, 130 }) {
            const spac_panel *in_a = spac_panel_for(a, type, 100), *in_b = spac_panel_for(b, type, 100);
            if (n_tokens > 7 && in_a && in_a->form != in_b->form) {
                continue;
            }
            const forward_input in = random_input(f, n_tokens, rng);
            CHECK(with_kernels(first, f, in, 1) == with_kernels(second, f, in, 1));
        }
    }
    printf("%s and %s give the same bits\n", a.name, b.name);
}

// a set is chosen by its name; of others nothing changes
static void test_choice(const std::vector<const spac_kernels *> & here) {
    const char *      variable = "PYSPAC_KERNELS";
    const char *      value    = getenv(variable);
    const std::string before   = value ? value : "";
    for (const spac_kernels * kernels : here) {
        setenv(variable, kernels->name, 1);
        CHECK(spac_kernels_best() == kernels);
    }
    setenv(variable, "abacus", 1);
    CHECK(spac_guard([] { spac_kernels_best(); }) == SPAC_STATUS_INVALID_ARGUMENT);
    unsetenv(variable);
    CHECK(spac_kernels_best() == (here.empty() ? nullptr : here[0]));
    if (value) {
        setenv(variable, before.c_str(), 1);
    }
}

int main() {
    const std::vector<const spac_kernels *> here = spac_kernels_here();
    test_choice(here);
    for (const spac_kernels * kernels : here) {
        test_every_weight(*kernels);
        test_largest(*kernels);
        test_rule(*kernels);
        test_formats(*kernels);
        test_layers(*kernels);
        test_edges(*kernels);
        test_worker(*kernels, true);
        test_worker(*kernels, false);
        test_worker_time(*kernels);
        test_declined(*kernels);
        test_ggml_dots(*kernels);
        for (const spac_kernels * other : here) {
            if (kernels == spac_kernels_avxvnni() && other == spac_kernels_avx2()) {
                test_same_bits(*kernels, *other);
            }
        }
    }
    printf("%zu sets of kernels tested\n", here.size());
    return 0;
}
