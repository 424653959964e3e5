// A fork of the process that attached an engine has none of its threads: there a decode fails at once, and the engine and its
// context go without waiting for anybody.
#include "check.h"
#include "spac.h"

#include "llama.h"

#include <cstring>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

static llama_model * load(bool is_lazy) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    params.use_extra_bufts    = false;
    if (is_lazy) {
        params.lazy_mode = LLAMA_LAZY_MODE_EXPERTS;
        params.load_mode = LLAMA_LOAD_MODE_NONE;
    }
    llama_model * model = llama_model_load_from_file(SPAC_DEMO_MODEL, params);
    CHECK(model);
    return model;
}

static llama_context * make_context(llama_model * model, int n_threads = 2) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 128;
    params.n_batch = params.n_ubatch = 16;
    params.n_threads = params.n_threads_batch = n_threads;
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

static int decode(llama_context * ctx) {
    llama_memory_clear(llama_get_memory(ctx), true);
    llama_token tokens[] = { 11, 502, 77, 1203 };
    return llama_decode(ctx, llama_batch_get_one(tokens, 4));
}

static bool says_why(spac_status status) {
    return status == SPAC_STATUS_INVALID_ARGUMENT && strstr(spac_last_error(), "forked from");
}

// exit status of a child: 0, or which of its expectations failed
static int be_child(llama_context * ctx, spac_engine * engine, bool context_first) {
    alarm(60); // it would wait for ever
    if (decode(ctx) >= 0 || decode(ctx) >= 0) {
        return 1;
    }
    int32_t        slot = 0;
    spac_tier_info tier = {};
    if (!says_why(spac_engine_apply(engine)) || !says_why(spac_engine_end_forward(engine)) || !says_why(spac_engine_wait_idle(engine, 1000)) ||
        !says_why(spac_engine_slot(engine, 0, 0, &slot)) || !says_why(spac_engine_cancel(engine))) {
        return 2;
    }
    if (spac_engine_get_tier(engine, &tier) != SPAC_STATUS_SUCCESS || !strstr(tier.error, "forked from")) {
        return 3;
    }
    if (context_first) {
        llama_free(ctx);
    }
    spac_engine_free(engine);
    if (!context_first) {
        if (decode(ctx) >= 0) {
            return 4;
        }
        llama_free(ctx);
    }
    return 0;
}

static void test_child(const char * what, llama_model * model, const spac_engine_params & params, bool after_decode, bool context_first) {
    llama_context * ctx    = make_context(model);
    spac_engine *   engine = nullptr;
    CHECK(spac_engine_attach(ctx, &params, &engine) == SPAC_STATUS_SUCCESS);
    CHECK(!after_decode || decode(ctx) == 0);
    const pid_t child = fork();
    if (child == 0) {
        _exit(be_child(ctx, engine, context_first));
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (status != 0) {
        fprintf(stderr, "%s: the child ended with %d by signal %d\n", what, WEXITSTATUS(status), WTERMSIG(status));
    }
    CHECK(status == 0);
    CHECK(decode(ctx) == 0); // the parent is as it was
    spac_engine_free(engine);
    llama_free(ctx);
}

// a draft model's context whose nodes ask the target's routers, on a thread
static void test_child_of_draft(llama_model * model) {
    llama_context *    ctx = make_context(model), *draft = make_context(model);
    spac_engine *      engine = nullptr;
    spac_engine_params params = spac_engine_default_params();
    params.device             = "cpu";
    params.cache              = "25%";
    CHECK(spac_engine_attach(ctx, &params, &engine) == SPAC_STATUS_SUCCESS);
    CHECK(spac_engine_watch_draft(engine, draft) == SPAC_STATUS_SUCCESS && decode(draft) == 0);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        const bool ok = decode(draft) < 0;
        llama_free(draft);
        spac_engine_free(engine);
        llama_free(ctx);
        _exit(!ok);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(decode(draft) == 0);
    spac_engine_free(engine);
    llama_free(draft);
    llama_free(ctx);
}

// an engine without threads works in a child, as a context without an engine does
static void test_child_without_threads(llama_model * model) {
    llama_context *    ctx    = make_context(model, 1);
    spac_engine *      engine = nullptr;
    spac_engine_params params = spac_engine_default_params();
    params.device             = "none";
    CHECK(spac_engine_attach(ctx, &params, &engine) == SPAC_STATUS_SUCCESS);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        bool ok = decode(ctx) == 0 && spac_engine_end_forward(engine) == SPAC_STATUS_SUCCESS;
        spac_engine_free(engine);
        ok = ok && decode(ctx) == 0;
        llama_free(ctx);
        _exit(!ok);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(decode(ctx) == 0);
    spac_engine_free(engine);
    llama_free(ctx);
}

extern "C" bool spac_attach_from_env(llama_context * ctx);

// an engine that its context owns
static void test_child_of_env(llama_model * model) {
    setenv("PYSPAC_DEVICE", "cpu", 1);
    llama_context * ctx = make_context(model);
    CHECK(spac_attach_from_env(ctx) && decode(ctx) == 0);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        const bool ok = decode(ctx) < 0;
        llama_free(ctx);
        _exit(!ok);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(decode(ctx) == 0);
    llama_free(ctx);
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    CHECK(spac_backend_load_all() == SPAC_STATUS_SUCCESS);
    llama_model *on_disk = load(true), *in_memory = load(false);

    test_child_without_threads(in_memory); // before anybody decodes: OpenMP's threads are not in a child either
    for (int i = 0; i < 4; i++) {
        spac_engine_params params = spac_engine_default_params();
        params.device             = "none";
        params.ram_bytes          = 6 << 20; // half of the demo model's experts
        params.next_layer         = 1;
        test_child("experts on disk, no device", on_disk, params, i % 2, i / 2);
        params.device    = "cpu";
        params.cache     = "25%";
        params.host_mode = SPAC_HOST_EXECUTOR;
        test_child("experts on disk beside a device", on_disk, params, i % 2, i / 2);
        params.ram_bytes  = 0;
        params.next_layer = 0;
        test_child("slots, an executor", in_memory, params, i % 2, i / 2);
        params.host_mode = SPAC_HOST_IN_GRAPH;
        test_child("slots, in the graph", in_memory, params, i % 2, i / 2);
    }
    test_child_of_draft(in_memory);
    test_child_of_env(in_memory);
    llama_model_free(on_disk);
    llama_model_free(in_memory);
    return 0;
}
