// The draft model's router inputs through the target's routers: the draft is the demo target in fewer bits. Run under ASan
// and TSan too.
#include "check.h"
#include "decide/draft-gate.h"
#include "engine.h"

#include "llama.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>

// the same cases as of the lab's: 3 layers of 1 copy, 10 us a layer of the draft, 2 drafts of 4 layers end at 80 us
static void test_cutoff_by_hand() {
    spac_draft_times t;
    t.n_draft       = 2;
    t.n_layer_draft = 4;
    t.layer_us      = 10;
    t.copy_us       = 20;
    t.n_slots       = 100;
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 3); // 10 + 60, 20 + 40, 30 + 20
    t.copy_us = 25;
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 2); // 10 + 75 is too late
    t.n_slots = 1;
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 1);
    t.copy_us = 71;
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 0);
    t.n_layer_draft = 8; // a draft twice as deep: 10 us more for each of the target's layers, and twice the time
    t.per_layer     = 2;
    t.n_slots       = 100;
    t.copy_us       = 45;
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 3); // 20 + 135, 40 + 90, 60 + 45
    t.copy_us = 47;
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 2); // 20 + 141 is too late
    t.copy_us = 0;                                 // no copy was measured yet: one layer's, for a beginning
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 1);
    t.layer_us = 0;
    CHECK(spac_cutoff_layer({ 1, 1, 1 }, t) == 0);
}

static llama_model * load(const std::string & path) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    params.use_extra_bufts    = false; // the same kernels on both sides
    llama_model * model       = llama_model_load_from_file(path.c_str(), params);
    CHECK(model);
    return model;
}

static llama_context * make_context(llama_model * model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 256;
    params.n_threads = params.n_threads_batch = 1; // two that spin are slow on a busy machine
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

static llama_token best(llama_context * ctx) {
    const float * logits = llama_get_logits_ith(ctx, -1);
    const int     n      = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    return (llama_token) (std::max_element(logits, logits + n) - logits);
}

static void decode(llama_context * ctx, std::vector<llama_token> tokens) {
    CHECK(llama_decode(ctx, llama_batch_get_one(tokens.data(), (int) tokens.size())) == 0);
}

static constexpr int N_STEPS = 24, N_DRAFT = 3;

// drafts N_DRAFT tokens and has all of them verified, N_STEPS times; returns the target's logits
// whatever the draft says goes on: what matters here is who computes it
static std::vector<float> run(llama_context * target, llama_context * draft, const std::function<void()> & after_draft) {
    llama_memory_clear(llama_get_memory(target), true);
    llama_memory_clear(llama_get_memory(draft), true);
    const int          n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(target)));
    std::vector<float> logits;
    llama_token        last = 11;
    for (int step = 0; step < N_STEPS; step++) {
        std::vector<llama_token> batch = { last };
        for (int i = 0; i < N_DRAFT; i++) {
            decode(draft, { batch.back() });
            after_draft();
            batch.push_back(best(draft));
        }
        last = batch.back();
        batch.pop_back(); // so that both have seen the same
        decode(target, batch);
        const float * row = llama_get_logits_ith(target, -1);
        logits.insert(logits.end(), row, row + n_vocab);
    }
    return logits;
}

static bool holds_any(const spac_board_view & view, uint32_t il) {
    const uint8_t * states = view.residency + il * view.geometry.n_expert;
    return std::any_of(states, states + view.geometry.n_expert, [](uint8_t s) { return s != SPAC_RESIDENCY_ABSENT; });
}

// copy_gb_s: of the emulated link; all copies are the predictor's
static void test_drafting(llama_model * target, llama_model * draft, double copy_gb_s) {
    llama_context *          ctx = make_context(target), *ctx_dft = make_context(draft);
    const std::vector<float> stock = run(ctx, ctx_dft, [] {});

    spac_engine_params params = spac_engine_default_params();
    params.device             = "cpu";
    params.cache              = "40%";
    params.copy_gb_s          = copy_gb_s;
    params.fill               = false;
    spac_engine engine(ctx, params);
    engine.watch_draft(ctx_dft);

    const spac_board_view    view      = engine.board->view();
    const spac_ahead_stats & s         = view.ahead[SPAC_AHEAD_DRAFT_GATE];
    uint64_t                 furthest  = 0;
    const auto               look_back = [&] {
        engine.draft_gate->wait_idle();
        furthest = std::max(furthest, s.cutoff_layer);
        for (uint32_t il = furthest; il < view.geometry.n_layer; il++) {
            CHECK(!holds_any(view, il)); // nothing was queued beyond the cutoff layer
        }
    };
    CHECK(run(ctx, ctx_dft, look_back) == stock);
    CHECK(engine.cache.wait_idle(20000));
    printf("%.3f GB/s: recall %.2f, precision %.2f; up to layer %d of %d; %d inputs, %.0f us each; %d queued, %d cut, %d dropped, %d copied, %d used\n", copy_gb_s,
           (double) s.n_hit / s.n_chosen, (double) s.n_hit / s.n_predicted, (int) furthest, (int) view.geometry.n_layer, (int) s.n_inputs, (double) s.us / s.n_inputs,
           (int) s.n_queued, (int) s.n_cut, (int) s.n_dropped, (int) s.n_copied, (int) s.n_used);
    CHECK(s.n_inputs == (uint64_t) N_STEPS * N_DRAFT * view.geometry.n_layer && s.n_late == 0);
    CHECK(s.n_hit > 0.7 * s.n_chosen && s.n_hit > 0.7 * s.n_predicted); // of 32 experts 4 are used
    CHECK(s.n_queued > 0 && s.n_copied > 0 && s.n_copied + s.n_dropped == s.n_queued && s.n_used + s.n_wasted <= s.n_copied);
    CHECK(copy_gb_s == 0 || (furthest < view.geometry.n_layer && s.n_cut > 0)); // a slow link: not for all layers
    llama_free(ctx_dft);
    engine.cache.check();
    llama_free(ctx);
}

// SP-MoE's own settings: the first expert of each of two layers, whatever the link is like
static void test_limits(llama_model * target, llama_model * draft) {
    llama_context *    ctx = make_context(target), *ctx_dft = make_context(draft);
    spac_engine_params params = spac_engine_default_params();
    params.device             = "cpu";
    params.cache              = "100%";
    params.copy_gb_s          = 0.002;
    params.fill               = false;
    spac_engine      engine(ctx, params);
    spac_gate_limits limits;
    limits.cutoff     = 2;
    limits.n_critical = 1;
    engine.watch_draft(ctx_dft, limits);
    run(ctx, ctx_dft, [&] {
        engine.draft_gate->wait_idle();
        CHECK(engine.cache.wait_idle(20000)); // what still waits for the link when its layer runs is dropped
    });
    const spac_board_view    view = engine.board->view();
    const spac_ahead_stats & s    = view.ahead[SPAC_AHEAD_DRAFT_GATE];
    CHECK(s.cutoff_layer == 2 && s.n_queued > 0);
    CHECK(holds_any(view, 0) && holds_any(view, 1));
    for (uint32_t il = 2; il < view.geometry.n_layer; il++) {
        CHECK(!holds_any(view, il));
    }
    CHECK(s.n_predicted <= s.n_inputs && s.n_predicted > 0.8 * s.n_inputs / N_DRAFT); // one for each input, fewer where two name the same
    llama_free(ctx_dft);
    llama_free(ctx);
}

// of another width
static void test_refusals(llama_model * target, llama_model * dense) {
    llama_context *    ctx = make_context(target), *ctx_dft = make_context(dense);
    spac_engine_params params = spac_engine_default_params();
    params.device             = "cpu";
    spac_engine * engine      = nullptr;
    CHECK(spac_engine_attach(ctx, &params, &engine) == SPAC_STATUS_SUCCESS);
    CHECK(spac_engine_watch_draft(engine, ctx_dft) == SPAC_STATUS_INVALID_ARGUMENT && strstr(spac_last_error(), "layer 0 160 values can be read, where the target's layer 0 has 256"));
    CHECK(spac_engine_watch_draft(engine, ctx) == SPAC_STATUS_INVALID_ARGUMENT); // the target's own
    CHECK(spac_engine_watch_draft(engine, nullptr) == SPAC_STATUS_INVALID_ARGUMENT);
    decode(ctx_dft, { 11, 12 });
    decode(ctx, { 11, 12 });
    spac_engine_free(engine);
    llama_free(ctx_dft);
    llama_free(ctx);
}

// whichever of the three goes first
static void test_freed_in_any_order(llama_model * target, llama_model * draft) {
    for (int order = 0; order < 3; order++) {
        llama_context *    ctx = make_context(target), *ctx_dft = make_context(draft);
        spac_engine_params params = spac_engine_default_params();
        params.device             = "cpu";
        spac_engine * engine      = nullptr;
        CHECK(spac_engine_attach(ctx, &params, &engine) == SPAC_STATUS_SUCCESS);
        CHECK(spac_engine_watch_draft(engine, ctx_dft) == SPAC_STATUS_SUCCESS);
        decode(ctx_dft, { 11 });
        if (order == 0) {
            spac_engine_free(engine);
            decode(ctx_dft, { 12 });
            llama_free(ctx_dft);
            llama_free(ctx);
        } else if (order == 1) {
            llama_free(ctx_dft);
            decode(ctx, { 12 });
            llama_free(ctx);
            spac_engine_free(engine);
        } else {
            llama_free(ctx);
            decode(ctx_dft, { 12 });
            spac_engine_free(engine);
            llama_free(ctx_dft);
        }
    }
}

int main() {
    test_cutoff_by_hand();
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    CHECK(spac_backend_load_all() == SPAC_STATUS_SUCCESS);

    const char *                dir    = getenv("TMPDIR");
    const std::string           path   = std::string(dir ? dir : "/tmp") + "/test-draft-gate-" + std::to_string(getpid()) + ".gguf";
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype                       = LLAMA_FTYPE_MOSTLY_Q4_0;
    params.allow_requantize            = true;
    CHECK(llama_model_quantize(SPAC_DEMO_MODEL, path.c_str(), &params) == 0);

    llama_model *target = load(SPAC_DEMO_MODEL), *draft = load(path), *dense = load(SPAC_DEMO_DRAFT);
    unlink(path.c_str());
    for (double copy_gb_s : { 0.0, 0.002 }) {
        test_drafting(target, draft, copy_gb_s);
    }
    test_limits(target, draft);
    test_refusals(target, dense);
    test_freed_in_any_order(target, draft);
    for (llama_model * model : { target, draft, dense }) {
        llama_model_free(model);
    }
    return 0;
}
