// A system that has no thread left, at each place where attaching makes one: a status that says so, or an engine that works
// with fewer. Run under ASan and TSan too.
#include "check.h"
#include "spac.h"

#include "llama.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>

// of the calls from now on: the first that fails, and whether those after it do; 0: none
static std::atomic<int>  n_made{ 0 }, n_first{ 0 };
static std::atomic<bool> and_all_after{ false };

extern "C" int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * arg) noexcept {
    static const auto real  = (int (*)(pthread_t *, const pthread_attr_t *, void * (*) (void *), void *)) dlsym(RTLD_NEXT, "pthread_create");
    const int         i     = ++n_made;
    const bool        fails = n_first > 0 && (i == n_first || (i > n_first && and_all_after));
    return fails ? EAGAIN : real(thread, attributes, run, arg);
}

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

static llama_context * make_context(llama_model * model) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 128;
    params.n_batch = params.n_ubatch = 16;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

static std::vector<float> decode(llama_context * ctx) {
    llama_memory_clear(llama_get_memory(ctx), true);
    llama_token tokens[] = { 11, 502, 77, 1203 };
    CHECK(llama_decode(ctx, llama_batch_get_one(tokens, 4)) == 0);
    const float * logits = llama_get_logits_ith(ctx, -1);
    return { logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))) };
}

// attaches, with the draft model's context watched where there is one; NULL: a status, and its text names the cause
static spac_engine * try_to_attach(llama_context * ctx, llama_context * draft, const spac_engine_params & params) {
    spac_engine * engine = nullptr;
    spac_status   status = spac_engine_attach(ctx, &params, &engine);
    if (status == SPAC_STATUS_SUCCESS && draft) {
        status = spac_engine_watch_draft(engine, draft);
    }
    if (status != SPAC_STATUS_SUCCESS) {
        CHECK(status == SPAC_STATUS_INTERNAL && strstr(spac_last_error(), "no thread left"));
        spac_engine_free(engine);
        engine = nullptr;
    }
    return engine;
}

static void test_every_position(const char * what, llama_model * model, llama_context * draft, const spac_engine_params & params) {
    llama_context *          ctx      = make_context(model);
    spac_engine *            whole    = try_to_attach(ctx, draft, params);
    const std::vector<float> expected = decode(ctx);
    spac_engine_free(whole);
    const std::vector<float> stock = decode(ctx);

    int n_positions = 0, n_refused = 0;
    for (bool all_after : { false, true }) {
        for (int first = 1;; first++) {
            and_all_after         = all_after;
            n_made                = 0;
            n_first               = first;
            spac_engine * engine  = try_to_attach(ctx, draft, params);
            const bool    is_over = n_made < first;
            n_first               = 0;
            CHECK(decode(ctx) == (engine ? expected : stock));
            n_refused += !engine;
            spac_engine_free(engine);
            if (is_over) {
                break;
            }
            n_positions++;
        }
    }
    printf("%s: %d positions, %d refused\n", what, n_positions, n_refused);
    CHECK(n_positions > 0);
    llama_free(ctx);
}

int main() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    CHECK(spac_backend_load_all() == SPAC_STATUS_SUCCESS);
    llama_model *   on_disk = load(true), *in_memory = load(false);
    llama_context * draft = make_context(in_memory); // the model is its own draft

    spac_engine_params params = spac_engine_default_params();
    params.fill               = false;
    params.n_threads          = 3;
    params.device             = "none";
    params.ram_bytes          = 6 << 20; // half of the demo model's experts
    params.next_layer         = 1;
    test_every_position("experts on disk, no device", on_disk, draft, params);

    params.device    = "cpu";
    params.cache     = "25%";
    params.host_mode = SPAC_HOST_EXECUTOR;
    test_every_position("experts on disk beside a device", on_disk, nullptr, params);

    params.ram_bytes    = 0;
    params.next_layer   = 0;
    params.host_kernels = SPAC_KERNELS_SPAC;
    test_every_position("slots, the engine's own kernels", in_memory, draft, params);
#ifdef _OPENMP // else ggml's own threads end the process, as they do without an engine
    params.host_kernels = SPAC_KERNELS_GGML;
    test_every_position("slots, ggml's kernels", in_memory, draft, params);
#endif
    llama_free(draft);
    llama_model_free(on_disk);
    llama_model_free(in_memory);
    return 0;
}
