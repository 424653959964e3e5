// An engine on a real context, the demo model's: freed in the wrong order, aborted in the middle of a graph, attached twice,
// beside other contexts of the model. Run under ASan and TSan too.
#include "check.h"
#include "spac.h"

#include "llama-batch.h"
#include "llama-moe-hook.h"
#include "llama.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

typedef std::vector<float> floats;

static llama_model * model;

static llama_model * load_model() {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    params.use_extra_bufts    = false; // the same kernels on both sides
    llama_model * m           = llama_model_load_from_file(SPAC_DEMO_MODEL, params);
    CHECK(m);
    return m;
}

static llama_context * make_context() {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 256;
    params.n_threads = params.n_threads_batch = 2;
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

static spac_engine_params cpu_params() {
    spac_engine_params params = spac_engine_default_params();
    params.device             = "cpu";
    params.cache              = "25%";
    return params;
}

static spac_engine * attach(llama_context * ctx, const spac_engine_params & params) {
    spac_engine * engine = nullptr;
    if (spac_engine_attach(ctx, &params, &engine) != SPAC_STATUS_SUCCESS) {
        fprintf(stderr, "%s\n", spac_last_error());
    }
    CHECK(engine);
    return engine;
}

static const llama_token TEXT[] = { 11, 502, 77, 1203, 8, 345, 901, 23, 456, 12, 700, 31 };
static constexpr int     N_TEXT = sizeof(TEXT) / sizeof(TEXT[0]);

// logits of the last token of each batch of n_batch tokens; empty: aborted
static floats decode(llama_context * ctx, int n_batch) {
    llama_memory_clear(llama_get_memory(ctx), true);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    floats    logits;
    for (int i = 0; i + n_batch <= N_TEXT; i += n_batch) {
        std::vector<llama_token> tokens(TEXT + i, TEXT + i + n_batch);
        if (llama_decode(ctx, llama_batch_get_one(tokens.data(), n_batch)) != 0) {
            return {};
        }
        const float * last = llama_get_logits_ith(ctx, -1);
        logits.insert(logits.end(), last, last + n_vocab);
    }
    return logits;
}

// asks for every expert, which keeps the worker busy
static void want_all(spac_engine * engine) {
    const spac_board_view & view = *spac_board_get_view(spac_engine_board(engine));
    spac_decision_begin(spac_engine_board(engine));
    static uint32_t n_wishes = 0;
    n_wishes++;
    const uint32_t n_cells = view.geometry.n_layer * view.geometry.n_expert;
    for (uint32_t key = 0; key < n_cells; key++) {
        view.utility[key] = (key * 7 + n_wishes * 13) % 200 > 100 ? 255 : 1; // another half each time: loads and evictions
        view.load[key]    = key;
    }
    memset(view.tau, 200, view.geometry.n_layer);
    *view.n_load = n_cells;
    spac_decision_end(spac_engine_board(engine));
    CHECK(spac_engine_apply(engine) == SPAC_STATUS_SUCCESS);
}

static void test_context_freed_first() {
    for (int round = 0; round < 8; round++) {
        llama_model * shared      = model;
        model                     = load_model();
        llama_context *    ctx    = make_context();
        spac_engine_params params = cpu_params();
        params.cache              = "100%";
        params.host_mode          = round % 2 ? SPAC_HOST_EXECUTOR : SPAC_HOST_IN_GRAPH;
        spac_engine * engine      = attach(ctx, params);
        CHECK(!decode(ctx, 3).empty());
        want_all(engine);
        llama_free(ctx);
        llama_model_free(model); // what the worker copies from
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(spac_engine_end_forward(engine) == SPAC_STATUS_SUCCESS); // harmless from now on
        CHECK(spac_engine_cancel(engine) == SPAC_STATUS_SUCCESS);
        CHECK(spac_engine_wait_idle(engine, 10) == SPAC_STATUS_SUCCESS);
        spac_engine_free(engine);
        model = shared;
    }
}

struct abort_after {
    int n_left;
};

static bool count_down(void * data) {
    return --((abort_after *) data)->n_left == 0;
}

static constexpr int N_ABORTS = 100;

// wherever a graph is aborted, the next one starts from the beginning
static void test_aborted_graphs(int host_mode, int host_kernels) {
    llama_context * stock    = make_context();
    const floats    expected = decode(stock, 4);
    llama_free(stock);

    llama_context *    ctx    = make_context();
    spac_engine_params params = cpu_params();
    params.host_mode          = host_mode;
    params.host_kernels       = host_kernels;
    const bool is_exact       = host_kernels == SPAC_KERNELS_GGML;
    params.fill               = is_exact;
    spac_engine * engine      = attach(ctx, params);
    const floats  before      = is_exact ? expected : decode(ctx, 4); // with other kernels: as long as no expert moves
    int           n_aborted   = 0;
    for (int round = 0; round < N_ABORTS; round++) {
        abort_after data{ 1 + (round * 17) % 400 };
        llama_set_abort_callback(ctx, count_down, &data);
        n_aborted += decode(ctx, 4).empty();
        llama_set_abort_callback(ctx, nullptr, nullptr);
        CHECK(decode(ctx, 4) == before);
        if (is_exact && round % 20 == 0) {
            want_all(engine);
        }
    }
    printf("host mode %d, kernels %d: %d of %d graphs were aborted\n", host_mode, host_kernels, n_aborted, N_ABORTS);
    CHECK(n_aborted > N_ABORTS / 4);
    spac_engine_free(engine);
    llama_free(ctx);
}

static void test_second_engine() {
    llama_context * ctx   = make_context();
    const floats    stock = decode(ctx, 4);
    spac_engine *   first = attach(ctx, cpu_params()), *second = nullptr;

    const spac_engine_params params = cpu_params();
    CHECK(spac_engine_attach(ctx, &params, &second) == SPAC_STATUS_INVALID_ARGUMENT && !second);
    CHECK(strstr(spac_last_error(), "has an engine already") && strstr(spac_last_error(), "PYSPAC_CACHE"));
    CHECK(llama_get_moe_hook(ctx)->user_data == first);

    const spac_board_view & view     = *spac_board_get_view(spac_engine_board(first));
    const uint64_t          n_before = view.counters->n_forward;
    CHECK(decode(ctx, 4) == stock);
    spac_engine_end_forward(first);
    CHECK(view.counters->n_forward > n_before); // it is still at work
    spac_engine_free(first);
    CHECK(decode(ctx, 4) == stock);
    spac_engine_free(attach(ctx, cpu_params())); // one after the other is fine
    llama_free(ctx);
}

// an engine with the engine's own kernels comes and goes: other contexts of the model stay llama.cpp's
static void test_other_contexts() {
    llama_context *   stock    = make_context();
    const floats      expected = decode(stock, 12);
    std::atomic<bool> done{ false };
    std::thread       engines([&] {
        llama_context *    ctx    = make_context();
        spac_engine_params params = spac_engine_default_params();
        params.device             = "none";
        while (!done) {
            spac_engine * engine = attach(ctx, params);
            const floats  own    = decode(ctx, 12);
            CHECK(own.size() == expected.size() && std::isfinite(own[0]));
            spac_engine_free(engine);
        }
        llama_free(ctx); });
    for (int i = 0; i < 60; i++) {
        CHECK(decode(stock, 12) == expected);
    }
    done = true;
    engines.join();
    llama_free(stock);
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" // programs of today still ask for all experts at once so
static void set_warmup(llama_context * ctx, bool on) {
    llama_set_warmup(ctx, on);
}
#pragma GCC diagnostic pop

static int32_t n_threads_of(const llama_moe_hook & hook, uint32_t n_tokens) {
    llama_ubatch ubatch = {};
    ubatch.n_tokens     = n_tokens;
    return hook.n_threads(hook.user_data, nullptr, &ubatch);
}

// one thread beside the executor, whose threads work meanwhile; all of the context's where nothing is split
static void test_threads_of_graphs() {
    llama_context *    ctx        = make_context();
    spac_engine_params params     = cpu_params();
    params.host_mode              = SPAC_HOST_EXECUTOR;
    params.max_batch              = 4;
    spac_engine *          engine = attach(ctx, params);
    const llama_moe_hook * hook   = llama_get_moe_hook(ctx);
    CHECK(!decode(ctx, 4).empty() && n_threads_of(*hook, 4) == 1);
    CHECK(!decode(ctx, 6).empty() && n_threads_of(*hook, 6) == 0);
    CHECK(!decode(ctx, 2).empty() && n_threads_of(*hook, 2) == 1);
    set_warmup(ctx, true);                                         // all experts at once: llama.cpp's own graph
    CHECK(!decode(ctx, 3).empty() && n_threads_of(*hook, 3) == 0); // another width, so that a graph is built
    set_warmup(ctx, false);
    CHECK(!decode(ctx, 2).empty() && n_threads_of(*hook, 2) == 1);
    spac_engine_free(engine);
    llama_free(ctx);
}

static uint64_t sum(const uint32_t * counts, size_t n) {
    uint64_t total = 0;
    for (size_t i = 0; i < n; i++) {
        total += counts[i];
    }
    return total;
}

// a prompt is counted apart from what is decoded, layer by layer, and fills slots as it goes; its logits stay stock's
static void test_prompts_count(int host_mode, bool fill) {
    llama_context * stock    = make_context();
    const floats    expected = decode(stock, N_TEXT);
    llama_free(stock);

    llama_context *    ctx         = make_context();
    spac_engine_params params      = cpu_params();
    params.host_mode               = host_mode;
    params.max_batch               = 4;
    params.fill                    = fill;
    spac_engine *           engine = attach(ctx, params);
    const spac_board_view & view   = *spac_board_get_view(spac_engine_board(engine));
    CHECK(decode(ctx, N_TEXT) == expected);
    CHECK(view.counters->n_prompt_tokens == N_TEXT);
    for (uint32_t il = 0; il + 1 < view.geometry.n_layer; il++) { // the last one computes only the tokens whose logits are wanted
        CHECK(sum(view.prompt_counts + il * view.geometry.n_expert, view.geometry.n_expert) == (uint64_t) N_TEXT * view.geometry.n_expert_used);
        CHECK(sum(view.counts + il * view.geometry.n_expert, view.geometry.n_expert) == 0);
    }
    CHECK(spac_engine_wait_idle(engine, 5000) == SPAC_STATUS_SUCCESS);
    CHECK((view.counters->n_loads > 0) == fill);
    for (uint32_t il = 0; il + 1 < view.geometry.n_layer; il++) {
        uint32_t n_held = 0, n_unused = 0;
        for (uint32_t ie = 0; ie < view.geometry.n_expert; ie++) {
            n_held += view.residency[il * view.geometry.n_expert + ie] != SPAC_RESIDENCY_ABSENT;
            n_unused += view.residency[il * view.geometry.n_expert + ie] != SPAC_RESIDENCY_ABSENT && view.prompt_counts[il * view.geometry.n_expert + ie] == 0;
        }
        CHECK(n_held <= (view.group_slots[il] + view.geometry.n_layer - 1) / view.geometry.n_layer && n_unused == 0);
        CHECK((n_held > 0) == fill);
    }
    CHECK(decode(ctx, N_TEXT) == expected && view.counters->n_prompt_tokens == 2 * N_TEXT);
    CHECK(sum(view.counts, (view.geometry.n_layer - 1) * view.geometry.n_expert) == 0);
    CHECK(!decode(ctx, 1).empty() && sum(view.counts, view.geometry.n_expert) == (uint64_t) N_TEXT * view.geometry.n_expert_used);
    CHECK(view.counters->n_prompt_tokens == 2 * N_TEXT);
    spac_engine_free(engine);
    llama_free(ctx);
}

// a prompt's experts pass through the slots, which hold but two layers' of them and a few: its logits stay stock's
static void test_prompts_pass_through(int host_mode, const char * cache) {
    llama_context * stock    = make_context();
    const floats    expected = decode(stock, N_TEXT), expected_one = decode(stock, 1);
    llama_free(stock);

    llama_context *    ctx         = make_context();
    spac_engine_params params      = cpu_params();
    params.host_mode               = host_mode;
    params.cache                   = cache;
    params.max_batch               = 4;
    params.stage                   = SPAC_STAGE_ALWAYS;
    spac_engine *           engine = attach(ctx, params);
    const spac_board_view & view   = *spac_board_get_view(spac_engine_board(engine));
    for (int round = 0; round < 2; round++) {
        CHECK(decode(ctx, N_TEXT) == expected);
        CHECK(view.counters->n_prompt_tokens == (uint64_t) (round + 1) * N_TEXT);
        want_all(engine); // while the next one is on its way
        CHECK(decode(ctx, 1) == expected_one);
    }
    CHECK(view.counters->n_staged > 0 && view.counters->staged_bytes == view.counters->n_staged * view.expert_bytes[0]);
    CHECK(view.counters->n_pinned_steals == 0);
    spac_engine_free(engine);
    llama_free(ctx);
}

// what the log says of the rows since `first`, added up as the counts are: [n_layer, n_expert]
static std::vector<uint32_t> counted_from_log(const spac_board_view & v, uint64_t first) {
    std::vector<uint32_t> counts((size_t) v.geometry.n_layer * v.geometry.n_expert);
    for (uint64_t i = first; i < v.n_routed[0]; i++) {
        for (uint32_t cell = 0; cell < v.geometry.n_layer * v.geometry.n_expert_used; cell++) {
            const uint16_t ie = v.routed_experts[i % SPAC_N_ROUTED * v.geometry.n_layer * v.geometry.n_expert_used + cell];
            CHECK(ie < v.geometry.n_expert || ie == UINT16_MAX);
            if (ie < v.geometry.n_expert) {
                counts[cell / v.geometry.n_expert_used * v.geometry.n_expert + ie]++;
            }
        }
    }
    return counts;
}

// every token of a forward has a row, with its id and what it used; a prompt's last layer runs only for its last token
static void test_routing_log(int host_mode) {
    llama_context *    ctx          = make_context();
    spac_engine_params params       = cpu_params();
    params.host_mode                = host_mode;
    params.max_batch                = 4;
    spac_engine *           engine  = attach(ctx, params);
    const spac_board_view & view    = *spac_board_get_view(spac_engine_board(engine));
    const size_t            n_cells = (size_t) view.geometry.n_layer * view.geometry.n_expert, n_but_last = n_cells - view.geometry.n_expert;
    *view.looks_ahead = 1;

    CHECK(!decode(ctx, N_TEXT).empty()); // a prompt
    CHECK(spac_engine_end_forward(engine) == SPAC_STATUS_SUCCESS);
    CHECK(view.n_routed[0] == N_TEXT && memcmp(view.routed_tokens, TEXT, sizeof(TEXT)) == 0);
    std::vector<uint32_t> counts = counted_from_log(view, 0);
    CHECK(memcmp(counts.data(), view.prompt_counts, n_but_last * sizeof(uint32_t)) == 0);
    CHECK(sum(counts.data() + n_but_last, view.geometry.n_expert) == 0);

    const std::vector<uint32_t> before(view.counts, view.counts + n_cells);
    CHECK(!decode(ctx, 1).empty()); // one by one
    CHECK(spac_engine_end_forward(engine) == SPAC_STATUS_SUCCESS);
    CHECK(view.n_routed[0] == 2 * N_TEXT && memcmp(view.routed_tokens + N_TEXT, TEXT, sizeof(TEXT)) == 0);
    counts = counted_from_log(view, N_TEXT);
    for (size_t i = 0; i < n_cells; i++) {
        CHECK(counts[i] == view.counts[i] - before[i]);
    }
    spac_engine_free(engine);
    llama_free(ctx);
}

static llama_moe_hook engines_hook;
static int            n_nodes, n_log_nodes; // of the last graph; of these, the routing log's

static int32_t count_nodes(void * engine, ggml_cgraph * graph, const llama_ubatch * ubatch) {
    n_nodes     = ggml_graph_n_nodes(graph);
    n_log_nodes = 0;
    for (int i = 0; i < n_nodes; i++) {
        n_log_nodes += strncmp(ggml_graph_node(graph, i)->name, "spac_tokens", strlen("spac_tokens")) == 0;
    }
    return engines_hook.n_threads(engine, graph, ubatch);
}

static uint64_t count_writes() {
    uint64_t n = 0;
    FILE *   f = fopen("/proc/self/io", "r");
    CHECK(f && fscanf(f, "rchar: %*u wchar: %*u syscr: %*u syscw: %lu", &n) == 1);
    fclose(f);
    return n;
}

// a scheduler in another process asks for the routing log, and stops: else there is no node, no row and no write for it
static void test_log_for_who_asks() {
    const std::string  name   = "test-engine-log-" + std::to_string(getpid());
    llama_context *    ctx    = make_context();
    spac_engine_params params = cpu_params();
    params.max_batch          = 4;
    params.fill               = false; // nothing to copy: the worker has nothing to publish
    params.board_name         = name.c_str();
    spac_engine * engine      = attach(ctx, params);
    engines_hook              = *llama_get_moe_hook(ctx);
    llama_moe_hook hook       = engines_hook;
    hook.n_threads            = count_nodes;
    llama_set_moe_hook(ctx, &hook);
    spac_board * board = nullptr;
    CHECK(spac_board_open(name.c_str(), &board) == SPAC_STATUS_SUCCESS);
    const spac_board_view & view = *spac_board_get_view(board);

    const auto forwards = [&] { CHECK(!decode(ctx, 1).empty() && spac_engine_end_forward(engine) == SPAC_STATUS_SUCCESS); };
    CHECK(!decode(ctx, N_TEXT).empty()); // a prompt
    const int      n_nodes_of_prompt = n_nodes, n_logged_of_prompt = n_log_nodes;
    const auto     t_begin  = std::chrono::steady_clock::now();
    const uint64_t n_before = count_writes();
    forwards();
    const uint64_t n_writes = count_writes() - n_before;
    const auto     n_looks  = (std::chrono::steady_clock::now() - t_begin) / std::chrono::milliseconds(25) + 2; // of an idle worker
    CHECK(n_logged_of_prompt == 0 && n_log_nodes == 0 && view.n_routed[1] == 0);
    CHECK(n_writes <= N_TEXT + (uint64_t) n_looks); // one for each forward

    const int n_nodes_unasked = n_nodes;
    *view.looks_ahead         = 1;
    forwards(); // of which the first one sees it
    CHECK(n_log_nodes == 1 && n_nodes == n_nodes_unasked + 1 && view.n_routed[0] == N_TEXT - 1);
    CHECK(!decode(ctx, N_TEXT).empty() && n_log_nodes == 1 && n_nodes == n_nodes_of_prompt + 1);

    *view.looks_ahead = 0;
    forwards();
    const uint64_t n_rows = view.n_routed[1];
    forwards();
    CHECK(n_log_nodes == 0 && n_nodes == n_nodes_unasked && view.n_routed[1] == n_rows);
    spac_board_close(board);
    spac_engine_free(engine);
    llama_free(ctx);
}

// there is no look ahead where nothing is placed
static void test_no_routing_log_without_slots() {
    llama_context *    ctx         = make_context();
    spac_engine_params params      = spac_engine_default_params();
    params.device                  = "none";
    spac_engine *           engine = attach(ctx, params);
    const spac_board_view & view   = *spac_board_get_view(spac_engine_board(engine));
    *view.looks_ahead              = 1;
    CHECK(!decode(ctx, N_TEXT).empty() && !decode(ctx, 1).empty());
    CHECK(view.n_routed[0] == 0);
    spac_engine_free(engine);
    llama_free(ctx);
}

// without slots there is no worker: what a forward counted is out when its last layer is done, not when the next one begins
static void test_published_without_slots() {
    const std::string  name   = "test-engine-none-" + std::to_string(getpid());
    llama_context *    ctx    = make_context();
    spac_engine_params params = spac_engine_default_params();
    params.device             = "none";
    params.board_name         = name.c_str();
    spac_engine * engine      = attach(ctx, params);

    spac_board * board = nullptr;
    CHECK(spac_board_open(name.c_str(), &board) == SPAC_STATUS_SUCCESS);
    const spac_board_view & view = *spac_board_get_view(board);
    for (uint64_t n_tokens = N_TEXT; n_tokens <= 2 * N_TEXT; n_tokens += N_TEXT) {
        CHECK(!decode(ctx, N_TEXT).empty());
        uint64_t n_activations = 0;
        for (uint32_t key = 0; key < view.geometry.n_layer * view.geometry.n_expert; key++) {
            n_activations += view.counts[key];
        }
        // of the last layer only the last token's: its logits are all that is asked for
        CHECK(n_activations == ((view.info->n_layer_split - 1) * n_tokens + n_tokens / N_TEXT) * view.info->n_expert_used);
    }
    spac_board_close(board);
    spac_engine_free(engine);
    llama_free(ctx);
}

extern "C" bool spac_attach_from_env(llama_context * ctx);

static void decide(spac_board * board, const spac_board_view & view, int32_t n_draft_max) {
    spac_decision_begin(board);
    *view.n_load = 0;
    spac_decision_end(board);
    view.n_draft_max[3] = n_draft_max;
}

// a prompt in a context with the engine of the environment: whether anything was copied
static bool loads_by_prompt(const char * fill) {
    const std::string name = "test-engine-fill-" + std::to_string(getpid());
    setenv("PYSPAC_DEVICE", "cpu", 1);
    setenv("PYSPAC_BOARD", name.c_str(), 1);
    setenv("PYSPAC_MAX_BATCH", "4", 1);
    setenv("PYSPAC_FILL", fill, 1);
    llama_context * ctx = make_context();
    CHECK(spac_attach_from_env(ctx));
    spac_board * board = nullptr;
    CHECK(spac_board_open(name.c_str(), &board) == SPAC_STATUS_SUCCESS);
    const spac_board_view & view = *spac_board_get_view(board);
    CHECK(!decode(ctx, N_TEXT).empty());
    for (int i = 0; i < 200 && (view.counters->n_prompt_tokens == 0 || (*fill == '1' && view.counters->n_loads == 0)); i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(25)); // until the board is written
    }
    CHECK(view.counters->n_prompt_tokens == N_TEXT);
    const bool has_loads = view.counters->n_loads > 0;
    spac_board_close(board);
    llama_free(ctx);
    unsetenv("PYSPAC_MAX_BATCH");
    unsetenv("PYSPAC_FILL");
    return has_loads;
}

static void test_fill_from_env() {
    CHECK(loads_by_prompt("1") && !loads_by_prompt("0"));
    setenv("PYSPAC_FILL", "no", 1);
    llama_context * ctx = make_context();
    CHECK(!spac_attach_from_env(ctx) && strstr(spac_last_error(), "PYSPAC_FILL \"no\": give 0 or 1"));
    llama_free(ctx);
    unsetenv("PYSPAC_FILL");
}

// a scheduler that says nothing for 10 s of decoding is gone: its limits no longer hold, and the engine's own policy loads
static void test_scheduler_gone() {
    const std::string name = "test-engine-" + std::to_string(getpid());
    setenv("PYSPAC_DEVICE", "cpu", 1);
    setenv("PYSPAC_BOARD", name.c_str(), 1);
    llama_context * ctx = make_context();
    CHECK(spac_attach_from_env(ctx));
    const llama_moe_hook * hook = llama_get_moe_hook(ctx);

    spac_board * board = nullptr;
    CHECK(spac_board_open(name.c_str(), &board) == SPAC_STATUS_SUCCESS);
    const spac_board_view & view = *spac_board_get_view(board);
    decide(board, view, 2);
    CHECK(!decode(ctx, 4).empty() && !decode(ctx, 4).empty());
    CHECK(hook->n_draft_max(hook->user_data, 3) == 2);
    const uint64_t n_loads = view.counters->n_loads;

    for (int i = 0; i < 11; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1050));
        CHECK(!decode(ctx, 4).empty());
    }
    CHECK(hook->n_draft_max(hook->user_data, 3) == -1);
    for (int i = 0; i < 20; i++) {
        CHECK(!decode(ctx, 4).empty());
    }
    CHECK(view.counters->n_loads > n_loads);

    decide(board, view, 2); // it is back
    CHECK(!decode(ctx, 4).empty() && hook->n_draft_max(hook->user_data, 3) == 2);
    spac_board_close(board);
    llama_free(ctx); // and the engine with it
    CHECK(spac_board_open(name.c_str(), &board) == SPAC_STATUS_BOARD);
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    CHECK(spac_backend_load_all() == SPAC_STATUS_SUCCESS);
    model = load_model();
    test_second_engine();
    test_threads_of_graphs();
    for (bool fill : { true, false }) {
        test_prompts_count(SPAC_HOST_IN_GRAPH, fill);
        test_prompts_count(SPAC_HOST_EXECUTOR, fill);
    }
    for (const char * cache : { "34%", "100%" }) {
        test_prompts_pass_through(SPAC_HOST_IN_GRAPH, cache);
        test_prompts_pass_through(SPAC_HOST_EXECUTOR, cache);
    }
    test_routing_log(SPAC_HOST_IN_GRAPH);
    test_routing_log(SPAC_HOST_EXECUTOR);
    test_log_for_who_asks();
    test_no_routing_log_without_slots();
    test_published_without_slots();
    test_context_freed_first();
    test_aborted_graphs(SPAC_HOST_IN_GRAPH, SPAC_KERNELS_GGML);
    test_aborted_graphs(SPAC_HOST_EXECUTOR, SPAC_KERNELS_GGML);
    test_aborted_graphs(SPAC_HOST_EXECUTOR, SPAC_KERNELS_SPAC);
    test_other_contexts();
    test_fill_from_env();
    test_scheduler_gone();
    llama_model_free(model);
    return 0;
}
