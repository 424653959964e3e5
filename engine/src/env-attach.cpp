// Attaches to an unmodified llama.cpp program: libllama calls this when PYSPAC_CACHE or PYSPAC_TRACE is set (patches/hooks/0001).
//
//   PYSPAC_CACHE    17%, a number of MiB, or auto; without a device auto or 0; of several devices one for each, with commas
//   PYSPAC_DEVICE   auto (the GPU, or none), none (every expert on the host), emulated, or ggml's names of devices, with commas
//   PYSPAC_BOARD    name of a shared board for a scheduler; else the built-in policy decides
//   PYSPAC_HOST_KERNELS  auto, spac or ggml
//   PYSPAC_CPU_RANGE  0-7: the host's own threads run there, each pinned to one core
//   PYSPAC_RAM      8000 (MiB), 8G or 25%: memory for experts that stay on disk; else all are loaded
//   PYSPAC_BASELINE lru+fetch: who leaves the device, and what becomes of an expert that is not there; +per-layer: each layer has slots of its own (docs/policies.md); else decisions say it
//   PYSPAC_LOSSY   drop:2: an expert that is not there and not among its token's best 2 is left out; else none is
//   PYSPAC_MAX_KL   what that may cost llama-server's tokens in the mean: KL divergence in nats (split/exact-sample.h)
//   PYSPAC_FILL     0: free slots wait for a decision (1: what was just used takes them)
//   PYSPAC_STAGE    0: the experts of prompts do not pass through the slots (1: where that is faster)
//   PYSPAC_EVICT    0: a full pool stays as it is, for comparison (1)
//   PYSPAC_COPY_GB_S  copies no faster than this, in 1e9 bytes/s: another machine's link; with commas one for each device
//   PYSPAC_PREDICT  the engine's own predictors: next-layer, next-layer-2 or next-layer-3, and draft-gate, with commas between
//                   them, or none; draft-gate:cutoff=N:critical=N has SP-MoE's settings (spac_gate_limits)
//   PYSPAC_MTP      an adapter with mask tokens, which drafts for llama-server; it is loaded with --lora
//   PYSPAC_MASKS    how many tokens it drafts at most; the context has as many sequences more (patches/hooks/0006)
//   PYSPAC_NGRAM    so many tokens at most llama-server drafts from what followed the last ones earlier in the text, in the place
//                   of its --spec-type, which has drafts as long
//   PYSPAC_MAX_BATCH  widest batch that is split (32); several sequences verify their drafts in one batch
//   PYSPAC_TRACE    a file for what the routers choose, instead of all this: the graphs stay stock (trace/routing-trace.h)
//   PYSPAC_TRACE_ADD  what else it gets: logits, inputs, draft-inputs, with commas between them
#include "base/engine-params.h"
#include "base/status.h"
#include "engine.h"
#include "env-values.h"
#include "trace/routing-trace.h"

#include "llama-model.h"
#include "llama.h"

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

static std::atomic<bool>          attached{ false }; // to the first MoE context; later ones are drafts
static std::atomic<spac_engine *> target{ nullptr }; // its engine
static std::atomic<bool>          gates_drafts{ false };
static spac_gate_limits           gate_limits; // set before

static const char * env_or(const char * name, const char * fallback) {
    const char * value = getenv(name);
    return value && *value ? value : fallback;
}

static int32_t max_batch() {
    return spac_read_n_tokens("PYSPAC_MAX_BATCH", env_or("PYSPAC_MAX_BATCH", "32"), SPAC_MAX_BATCH);
}

// 0: no limit
static double max_kl() {
    const char * text = env_or("PYSPAC_MAX_KL", nullptr);
    return text ? spac_read_max_kl("PYSPAC_MAX_KL", text) : 0;
}

// NULL: none are asked for
static std::unique_ptr<spac_mask_drafter> make_masks(llama_context * ctx) {
    const char * path = env_or("PYSPAC_MTP", nullptr);
    return path ? std::make_unique<spac_mask_drafter>(ctx, path, spac_read_n_tokens("PYSPAC_MASKS", env_or("PYSPAC_MASKS", ""), SPAC_DRAFT_MAX), max_batch()) : nullptr;
}

// NULL: not set
static const char * checked(const char * name) {
    const char * text = env_or(name, nullptr);
    if (text && spac_check_value(name, name, text) != SPAC_STATUS_SUCCESS) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_last_error());
    }
    return text;
}

static bool is_on(const char * name) {
    return spac_read_switch(name, env_or(name, "1"));
}

static uint64_t expert_bytes(llama_context * ctx) {
    uint64_t n = 0;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(llama_get_model(ctx))) {
        n += name.find("_exps.weight") != std::string::npos ? ggml_nbytes(tensor) : 0;
    }
    return n;
}

// 0: all experts are in memory
static uint64_t checked_ram(llama_context * ctx) {
    const char * text = env_or("PYSPAC_RAM", nullptr);
    if (!text) {
        return 0;
    }
    const uint64_t bytes = spac_size_bytes("PYSPAC_RAM", text, expert_bytes(ctx));
    if (bytes == UINT64_MAX || bytes == 0) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_RAM cannot be %s here: give MiB (8000), GiB (8G) or a share of all experts (25%%)", text));
    }
    return bytes;
}

static void free_with_context(void * user_data) {
    spac_engine * engine = (spac_engine *) user_data;
    target               = nullptr;
    engine->forget_context();
    spac_engine::free(engine);
    attached = false;
}

static void attach(llama_context * ctx) {
    spac_engine_params params = spac_engine_default_params();
    params.cache              = env_or("PYSPAC_CACHE", "auto");
    params.device             = env_or("PYSPAC_DEVICE", "auto");
    params.board_name         = env_or("PYSPAC_BOARD", nullptr);
    params.max_batch          = max_batch();
    params.verbose            = true;
    params.host_kernels       = spac_read_host_kernels("PYSPAC_HOST_KERNELS", env_or("PYSPAC_HOST_KERNELS", "auto"));
    params.cpu_range          = env_or("PYSPAC_CPU_RANGE", nullptr);
    params.lossy              = checked("PYSPAC_LOSSY");
    params.baseline           = checked("PYSPAC_BASELINE");
    params.ram_bytes          = checked_ram(ctx);
    params.fill               = is_on("PYSPAC_FILL");
    params.evict              = is_on("PYSPAC_EVICT");
    spac_read_copy_speeds("PYSPAC_COPY_GB_S", env_or("PYSPAC_COPY_GB_S", ""), params);
    params.stage = is_on("PYSPAC_STAGE") ? SPAC_STAGE_AUTO : SPAC_STAGE_NEVER;

    const spac_predictors p = spac_read_predictors("PYSPAC_PREDICT", env_or("PYSPAC_PREDICT", ""));
    params.next_layer       = p.next_layer;
    gate_limits             = p.limits;
    gates_drafts            = p.draft_gate;

    std::unique_ptr<spac_ngram_drafter> ngram;
    if (const char * n = env_or("PYSPAC_NGRAM", nullptr)) {
        ngram = std::make_unique<spac_ngram_drafter>(spac_read_n_tokens("PYSPAC_NGRAM", n, SPAC_DRAFT_MAX));
    }
    target = new spac_engine(ctx, params, free_with_context, make_masks(ctx), std::move(ngram), max_kl()); // owned by the context
}

// a context beside the engine's: that of a draft model, most likely
static void see_another(llama_context * ctx) {
    spac_engine * engine = target;
    if (!engine || engine->is_away() || !gates_drafts) {
        spac_log("another context has the engine; this one, a draft model's most likely, needs none");
    } else if (spac_guard([&] { engine->watch_draft(ctx, gate_limits); }) == SPAC_STATUS_SUCCESS) {
        spac_log("the inputs of this context's routers tell what the target's will choose (draft-gate)");
    } else {
        spac_log("the draft model's context is not asked (draft-gate), drafting goes on: %s", spac_last_error());
    }
}

static bool record(llama_context * ctx, const char * path) {
    const spac_status status = spac_guard([&] {
        if (env_or("PYSPAC_CACHE", nullptr)) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "PYSPAC_TRACE records graphs that are not split: unset PYSPAC_CACHE, or PYSPAC_TRACE");
        }
        spac_routing_trace::attach(ctx, path, spac_trace_wants::read(env_or("PYSPAC_TRACE_ADD", "")), make_masks(ctx));
    });
    if (status != SPAC_STATUS_SUCCESS) {
        spac_log("%s", spac_last_error());
    }
    return status == SPAC_STATUS_SUCCESS;
}

// false: the context must not be used
extern "C" SPAC_API bool spac_attach_from_env(llama_context * ctx) {
    if (const char * path = env_or("PYSPAC_TRACE", nullptr)) {
        return record(ctx, path);
    }
    if (const char * cache = getenv("PYSPAC_CACHE"); cache ? !*cache : getenv("PYSPAC_TRACE") != nullptr) {
        return true; // empty is as good as unset
    }
    if (attached.exchange(true)) {
        see_another(ctx);
        return true;
    }
    bool              stays_stock = false;
    const spac_status status      = spac_guard([&] {
        try {
            attach(ctx);
        } catch (const spac_stays_stock &) { // a dense draft, most likely, or a tool that watches the graph
            stays_stock = true;
            throw;
        }
    });
    if (status != SPAC_STATUS_SUCCESS) {
        attached = false;
        spac_log("%s%s", spac_last_error(), stays_stock ? "; this context stays as it is" : "");
    }
    return status == SPAC_STATUS_SUCCESS || stays_stock;
}
