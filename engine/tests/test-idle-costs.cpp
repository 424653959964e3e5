// What is off costs nothing: graph nodes, system calls and locks of a decoding step, with an engine whose scheduler, look-ahead,
// predictors and drafts are off, against llama.cpp's own step.
#include "check.h"
#include "spac.h"

#include "llama-moe-hook.h"
#include "llama.h"

#include <chrono>
#include <cstdio>
#include <string>

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static thread_local uint64_t n_locks = 0;

#if !defined(__SANITIZE_THREAD__) // which has to see them itself
extern "C" int pthread_mutex_lock(pthread_mutex_t * mutex) noexcept {
    static const auto real = (int (*)(pthread_mutex_t *)) dlsym(RTLD_NEXT, "pthread_mutex_lock");
    n_locks++;
    return real(mutex);
}
#endif

struct costs {
    int      n_nodes;
    uint64_t n_locks, n_reads, n_writes; // of N_STEPS steps
    uint64_t n_looks;                    // ten times a second at how long each thread waited for a core (host/team-watch.h)
};

static constexpr uint64_t N_STEPS = 50;

static int            n_nodes; // of the last graph
static llama_moe_hook engines_hook;

static int32_t count_nodes(void * engine, ggml_cgraph * graph, const llama_ubatch * ubatch) {
    n_nodes = ggml_graph_n_nodes(graph);
    return engines_hook.n_threads ? engines_hook.n_threads(engine, graph, ubatch) : 0;
}

static void read_io(uint64_t & n_reads, uint64_t & n_writes) {
    FILE * f = fopen("/proc/self/io", "r");
    CHECK(f && fscanf(f, "rchar: %*u wchar: %*u syscr: %lu syscw: %lu", &n_reads, &n_writes) == 2);
    fclose(f);
}

static void step(llama_context * ctx, int i) {
    llama_token token = 11 + i;
    CHECK(llama_decode(ctx, llama_batch_get_one(&token, 1)) == 0);
    CHECK(llama_get_logits_ith(ctx, -1));
}

static costs measure(llama_context * ctx, spac_engine * engine) {
    engines_hook = {};
    if (engine) {
        engines_hook        = *llama_get_moe_hook(ctx);
        llama_moe_hook hook = engines_hook;
        hook.n_threads      = count_nodes;
        llama_set_moe_hook(ctx, &hook);
    }
    for (int i = 0; i < 10; i++) {
        step(ctx, i);
    }
    costs    before = { n_nodes, n_locks, 0, 0, 0 }, after = {};
    uint64_t n_own_reads = 0, ignored = 0;
    read_io(before.n_reads, before.n_writes);
    read_io(n_own_reads, ignored);
    n_own_reads -= before.n_reads;
    const auto begin = std::chrono::steady_clock::now();
    for (uint64_t i = 0; i < N_STEPS; i++) {
        step(ctx, 20 + (int) i);
        CHECK(!engine || spac_engine_end_forward(engine) == SPAC_STATUS_SUCCESS);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    read_io(after.n_reads, after.n_writes);
    const uint64_t n_reads = after.n_reads - before.n_reads - 2 * n_own_reads;
    return { n_nodes, n_locks - before.n_locks, n_reads, after.n_writes - before.n_writes, 1 + (uint64_t) (10 * seconds.count()) };
}

static llama_context * make_context(llama_model * model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 256;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

static costs with_engine(llama_model * model, const char * device, const char * board) {
    llama_context *    ctx    = make_context(model);
    spac_engine_params params = spac_engine_default_params();
    params.device             = device;
    params.cache              = std::string(device) == "none" ? "0" : "25%";
    params.fill               = false; // nothing to copy: the worker has nothing to publish
    params.board_name         = board;
    spac_engine * engine      = nullptr;
    CHECK(spac_engine_attach(ctx, &params, &engine) == SPAC_STATUS_SUCCESS);
    const costs found = measure(ctx, engine);
    spac_engine_free(engine);
    llama_free(ctx);
    return found;
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    CHECK(spac_backend_load_all() == SPAC_STATUS_SUCCESS);
    llama_model_params mparams = llama_model_default_params();
    mparams.n_gpu_layers       = 0;
    mparams.use_extra_bufts    = false;
    llama_model * model        = llama_model_load_from_file(SPAC_DEMO_MODEL, mparams);
    CHECK(model);

    llama_context * ctx   = make_context(model);
    const costs     stock = measure(ctx, nullptr);
    llama_free(ctx);
    CHECK(stock.n_reads == 0 && stock.n_writes == 0);
    const std::string name = "test-idle-costs-" + std::to_string(getpid());

    // without slots: a look for a decision, whatever the number of layers
    const costs alone = with_engine(model, "none", nullptr);
    CHECK(alone.n_locks <= stock.n_locks + N_STEPS && alone.n_reads <= 2 * alone.n_looks && alone.n_writes == 0);

    // on a board that others see: one read and one write, each under a lock
    const costs shared = with_engine(model, "none", name.c_str());
    CHECK(shared.n_nodes == alone.n_nodes && shared.n_locks <= stock.n_locks + 2 * N_STEPS);
    CHECK(shared.n_reads <= N_STEPS + 2 * shared.n_looks && shared.n_writes <= N_STEPS);

    // with slots: the cache once per layer, at the beginning and at the end
    const costs split = with_engine(model, "cpu", nullptr);
    CHECK(split.n_locks <= stock.n_locks + N_STEPS * (6 + 4) && split.n_reads == 0 && split.n_writes == 0);
    llama_model_free(model);
    return 0;
}
