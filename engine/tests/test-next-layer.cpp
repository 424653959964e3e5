// Routers that are asked early: found in graphs of every form, applied as the graph itself does, and on the demo model, where
// predictions move experts and never logits. Run under ASan and TSan too.
#include "base/status.h"
#include "check.h"
#include "decide/routers.h"
#include "engine.h"

#include "llama.h"

#include "ggml-alloc.h"
#include "ggml-cpu.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>

static constexpr int N_EMBD = 64, N_EXPERT = 16, N_USED = 4, N_TOKENS = 7;

// ---- only routers

struct router_fixture {
    ggml_context *        weights = ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true });
    ggml_tensor *         weight, *bias, *selection_bias;
    ggml_backend_buffer_t buffer;
    ggml_context *        ctx = ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_tensor *         input, *ids = nullptr;
    std::vector<float>    rows;

    explicit router_fixture(ggml_type type) :
        weight(ggml_new_tensor_2d(weights, type, N_EMBD, N_EXPERT)), bias(ggml_new_tensor_1d(weights, GGML_TYPE_F32, N_EXPERT)),
        selection_bias(ggml_new_tensor_1d(weights, GGML_TYPE_F32, N_EXPERT)),
        buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights, ggml_backend_cpu_buffer_type())),
        input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_EMBD, N_TOKENS)), rows(N_EMBD * N_TOKENS) {
        std::mt19937                          rng(11);
        std::uniform_real_distribution<float> uniform(-1, 1);
        for (ggml_tensor * t : { weight, bias, selection_bias }) {
            std::vector<float> values(ggml_nelements(t));
            for (float & v : values) {
                v = uniform(rng) * 0.3f;
            }
            ggml_quantize_chunk(t->type, values.data(), t->data, 0, ggml_nrows(t), t->ne[0], nullptr);
        }
        for (float & v : rows) {
            v = uniform(rng);
        }
        ggml_set_input(input);
    }

    ~router_fixture() {
        ggml_free(ctx);
        ggml_backend_buffer_free(buffer);
        ggml_free(weights);
    }

    ggml_tensor * logits() { return ggml_mul_mat(ctx, weight, input); }

    // the distinct experts that the graph chooses
    std::vector<int32_t> run(ggml_tensor * chosen) {
        ids                  = chosen;
        ggml_backend_t cpu   = ggml_backend_cpu_init();
        ggml_cgraph *  gf    = ggml_new_graph(ctx);
        ggml_gallocr_t alloc = ggml_gallocr_new(ggml_backend_cpu_buffer_type());
        ggml_set_output(ids);
        ggml_build_forward_expand(gf, ids);
        CHECK(ggml_gallocr_alloc_graph(alloc, gf));
        ggml_backend_tensor_set(input, rows.data(), 0, ggml_nbytes(input));
        ggml_backend_cpu_set_n_threads(cpu, 1);
        CHECK(ggml_backend_graph_compute(cpu, gf) == GGML_STATUS_SUCCESS);
        spac_activations      activations(N_EXPERT);
        std::vector<uint32_t> totals(N_EXPERT);
        activations.count(ids, N_EXPERT, totals.data());
        ggml_gallocr_free(alloc);
        ggml_backend_free(cpu);
        return activations.experts;
    }

    std::vector<int32_t> predict() {
        spac_moe_layer layer;
        layer.il            = 3;
        layer.n_expert_used = N_USED;
        layer.n_expert      = N_EXPERT;
        layer.router        = spac_find_router(ids, N_EXPERT);
        CHECK(layer.router.weight == weight && layer.router.input == input);
        return spac_routers({ &layer }).choose(3, rows.data(), N_TOKENS);
    }
};

// as llama.cpp builds them, with both biases, with one, with none
static void test_router(ggml_type type, const std::function<ggml_tensor *(router_fixture &)> & build) {
    router_fixture       f(type);
    std::vector<int32_t> chosen = f.run(ggml_argsort_top_k(f.ctx, build(f), N_USED)), predicted = f.predict();
    std::sort(chosen.begin(), chosen.end());
    std::sort(predicted.begin(), predicted.end());
    CHECK(chosen == predicted && chosen.size() >= N_USED);
}

static void test_routers(ggml_type type) {
    test_router(type, [](router_fixture & f) { return f.logits(); });
    test_router(type, [](router_fixture & f) { return ggml_soft_max(f.ctx, f.logits()); });
    test_router(type, [](router_fixture & f) { return ggml_add(f.ctx, f.logits(), f.bias); }); // gpt-oss
    test_router(type, [](router_fixture & f) { return ggml_soft_max(f.ctx, ggml_add(f.ctx, f.logits(), f.bias)); });
    test_router(type, [](router_fixture & f) { return ggml_add(f.ctx, ggml_soft_max(f.ctx, f.logits()), f.selection_bias); });
    test_router(type, [](router_fixture & f) { return ggml_add(f.ctx, ggml_sigmoid(f.ctx, f.logits()), f.selection_bias); }); // DeepSeek V3
    test_router(type, [](router_fixture & f) {
        return ggml_add(f.ctx, ggml_sigmoid(f.ctx, ggml_add(f.ctx, f.logits(), f.bias)), f.selection_bias);
    });
    test_router(type, [](router_fixture & f) {
        return ggml_add(f.ctx, ggml_sqrt(f.ctx, ggml_softplus(f.ctx, f.logits())), f.selection_bias);
    });
}

// behind a limit to groups the router is found all the same, and the order without the limit is what it gives
static void test_router_with_groups() {
    router_fixture f(GGML_TYPE_F32);
    ggml_tensor *  groups = ggml_reshape_3d(f.ctx, ggml_sigmoid(f.ctx, f.logits()), N_EXPERT / 4, 4, N_TOKENS);
    ggml_tensor *  best   = ggml_argsort_top_k(f.ctx, ggml_cont_2d(f.ctx, ggml_sum_rows(f.ctx, groups), 4, N_TOKENS), 2);
    ggml_tensor *  rows   = ggml_get_rows(f.ctx, groups, best);
    rows                  = ggml_set_rows(f.ctx, ggml_fill(f.ctx, groups, -INFINITY), rows, best);
    f.run(ggml_argsort_top_k(f.ctx, ggml_reshape_2d(f.ctx, rows, N_EXPERT, N_TOKENS), N_USED));
    CHECK(f.predict().size() >= N_USED);
}

static void test_no_router() {
    router_fixture f(GGML_TYPE_F32);
    ggml_tensor *  ids = ggml_new_tensor_2d(f.ctx, GGML_TYPE_I32, N_USED, N_TOKENS);
    CHECK(!spac_find_router(ids, N_EXPERT).weight); // given from outside
    CHECK(!spac_find_router(ggml_argsort_top_k(f.ctx, f.logits(), N_USED), N_EXPERT + 1).weight);
    spac_moe_layer layer;
    bool           is_refused = false;
    try {
        spac_routers routers({ &layer });
    } catch (const spac_error & e) {
        is_refused = e.status == SPAC_STATUS_INVALID_ARGUMENT && strstr(e.what(), "router");
    }
    CHECK(is_refused);
}

// ---- on the demo model

static const llama_token TEXT[] = { 11, 502, 77, 1203, 8, 345, 901, 23, 456, 12, 700, 31 };
static constexpr int     N_TEXT = sizeof(TEXT) / sizeof(TEXT[0]);

static llama_model * model;

static llama_context * make_context() {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 256;
    params.n_threads = params.n_threads_batch = 1; // two that spin are slow on a busy machine
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

static std::vector<float> decode(llama_context * ctx, int n_batch, const std::function<void()> & before_each = [] {}) {
    llama_memory_clear(llama_get_memory(ctx), true);
    const int          n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<float> logits;
    for (int i = 0; i + n_batch <= N_TEXT; i += n_batch) {
        std::vector<llama_token> tokens(TEXT + i, TEXT + i + n_batch);
        before_each();
        CHECK(llama_decode(ctx, llama_batch_get_one(tokens.data(), n_batch)) == 0);
        const float * last = llama_get_logits_ith(ctx, -1);
        logits.insert(logits.end(), last, last + n_vocab);
    }
    return logits;
}

// other experts each time: half of them, and some of them wanted
static void place_at_random(spac_engine & engine, std::mt19937 & rng) {
    const spac_board_view view = engine.board->view();
    spac_decision_begin(engine.board.get());
    const uint32_t n_cells = view.geometry.n_layer * view.geometry.n_expert;
    for (uint32_t key = 0; key < n_cells; key++) {
        view.utility[key] = rng() % 4;
        view.load[key]    = key;
    }
    for (uint32_t il = 0; il < view.geometry.n_layer; il++) {
        view.tau[il] = 1 + rng() % 4;
    }
    *view.n_load      = rng() % 2 ? n_cells : 0;
    *view.byte_budget = rng() % 3 ? UINT64_MAX : 4 * view.expert_bytes[0];
    spac_decision_end(engine.board.get());
}

static void test_logits(int host_mode, int next_layer, double copy_gb_s) {
    llama_context *    ctx    = make_context();
    spac_engine_params params = spac_engine_default_params();
    params.device             = "cpu";
    params.cache              = "40%";
    params.host_mode          = host_mode;
    params.next_layer         = next_layer;
    params.copy_gb_s          = copy_gb_s;
    std::mt19937 rng(next_layer);
    for (const int n_batch : { 1, 3 }) {
        const std::vector<float> stock = decode(ctx, n_batch);
        spac_engine              engine(ctx, params);
        for (int round = 0; round < 6; round++) {
            CHECK(decode(ctx, n_batch, [&] { place_at_random(engine, rng); }) == stock);
            engine.cache.check();
        }
        engine.next_layer->wait_idle();
        const spac_ahead_stats & s = engine.board->ahead()[SPAC_AHEAD_NEXT_LAYER];
        printf("host mode %d, %d ahead, %d tokens: recall %.2f, precision %.2f; %d inputs, %d late, %.0f us each; %d queued, %d cut, %d dropped, "
               "%d copied, %d used, %d wasted\n",
               host_mode, next_layer, n_batch, (double) s.n_hit / s.n_chosen, (double) s.n_hit / s.n_predicted, (int) s.n_inputs, (int) s.n_late,
               (double) s.us / s.n_inputs, (int) s.n_queued, (int) s.n_cut, (int) s.n_dropped, (int) s.n_copied, (int) s.n_used, (int) s.n_wasted);
        CHECK(s.n_inputs > 0 && s.n_late < s.n_inputs && s.n_hit > 0 && s.n_hit <= s.n_chosen && s.n_hit <= s.n_predicted);
        CHECK(s.n_used + s.n_wasted <= s.n_copied && s.n_copied + s.n_dropped <= s.n_queued);
        CHECK(engine.board->counters()->n_pinned_steals == 0);
    }
    llama_free(ctx);
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    CHECK(spac_backend_load_all() == SPAC_STATUS_SUCCESS);
    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0 }) {
        test_routers(type);
    }
    test_router_with_groups();
    test_no_router();

    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    params.use_extra_bufts    = false; // the same kernels on both sides
    model                     = llama_model_load_from_file(SPAC_DEMO_MODEL, params);
    CHECK(model);
    for (int host_mode : { SPAC_HOST_IN_GRAPH, SPAC_HOST_EXECUTOR }) {
        test_logits(host_mode, 1, 0);
        test_logits(host_mode, 2, 0.5);
        test_logits(host_mode, 3, 0);
    }
    llama_model_free(model);
    return 0;
}
