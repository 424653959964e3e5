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
#include "trace/routing-trace.h"

#include "llama-model.h"
#include "llama.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <sstream>
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

static int32_t checked_number(const char * name, const std::string & text, int32_t max) {
    char *     end = nullptr;
    const long n   = strtol(text.c_str(), &end, 10);
    if (end == text.c_str() || *end || n < 1 || n > max) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s \"%s\": give a number of tokens from 1 to %d", name, text.c_str(), max));
    }
    return (int32_t) n;
}

static int32_t max_batch() {
    return checked_number("PYSPAC_MAX_BATCH", env_or("PYSPAC_MAX_BATCH", "32"), SPAC_MAX_BATCH);
}

// 0: no limit
static double checked_max_kl() {
    const char * text = env_or("PYSPAC_MAX_KL", nullptr);
    double       x    = 0;
    if (text && !spac_read_number(text, 1e-6, 100, x)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_MAX_KL \"%s\": give a mean KL divergence in nats per token, from 0.000001 to 100", text));
    }
    return x;
}

// NULL: none are asked for
static std::unique_ptr<spac_mask_drafter> make_masks(llama_context * ctx) {
    const char * path = env_or("PYSPAC_MTP", nullptr);
    return path ? std::make_unique<spac_mask_drafter>(ctx, path, checked_number("PYSPAC_MASKS", env_or("PYSPAC_MASKS", ""), SPAC_DRAFT_MAX), max_batch()) : nullptr;
}

static int32_t checked_host_kernels(const std::string & text) {
    const char * names[] = { "auto", "spac", "ggml" }; // index = spac_host_kernels
    for (int32_t i = 0; i < 3; i++) {
        if (text == names[i]) {
            return i;
        }
    }
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_HOST_KERNELS \"%s\": give auto, spac or ggml", text.c_str()));
}

// NULL: not set
static const char * checked(const char * name, spac_status (*read)(const char * name, const char * text)) {
    const char * text = env_or(name, nullptr);
    if (text && read(name, text) != SPAC_STATUS_SUCCESS) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_last_error());
    }
    return text;
}

static bool checked_switch(const char * name) {
    const std::string text = env_or(name, "1");
    if (text != "0" && text != "1") {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s \"%s\": give 0 or 1", name, text.c_str()));
    }
    return text == "1";
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

// the speeds of all devices, or of each
static void read_copy_speeds(const char * text, spac_engine_params & params) {
    std::istringstream  numbers(text);
    std::vector<double> found;
    for (std::string one; std::getline(numbers, one, ',');) {
        double n = 0;
        if (!spac_read_number(one, 0, 1e6, n) || found.size() == SPAC_N_DEVICES) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_COPY_GB_S \"%s\": give a speed in 1e9 bytes/s, or with commas one for each device", text));
        }
        found.push_back(n);
    }
    if (found.size() == 1) {
        params.copy_gb_s = found[0];
    } else {
        std::copy(found.begin(), found.end(), params.device_copy_gb_s);
    }
}

struct predictors {
    int32_t          next_layer = 0; // MoE layers ahead that routers are asked; 0: none
    bool             draft_gate = false;
    spac_gate_limits limits;
};

// of text such as "draft-gate:cutoff=20:critical=1"
static spac_gate_limits checked_gate_limits(const std::string & text) {
    spac_gate_limits   limits;
    std::istringstream knobs(text);
    std::string        one;
    for (std::getline(knobs, one, ':'); std::getline(knobs, one, ':');) {
        char end    = 0;
        bool is_set = sscanf(one.c_str(), "cutoff=%d%c", &limits.cutoff, &end) == 1 && limits.cutoff >= 0;
        is_set      = is_set || (sscanf(one.c_str(), "critical=%d%c", &limits.n_critical, &end) == 1 && limits.n_critical > 0);
        if (!is_set) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_PREDICT: draft-gate knows no \"%s\": give cutoff=N, the number of layers that are copied "
                                                                       "for, or critical=N, of experts of each, from 1 on",
                                                                       one.c_str()));
        }
    }
    return limits;
}

static predictors checked_predictors(const std::string & text) {
    const std::string  known[] = { "none", "draft-gate", "next-layer", "next-layer-2", "next-layer-3" };
    predictors         found;
    std::istringstream names(text);
    for (std::string one; std::getline(names, one, ',');) {
        if (one.rfind("draft-gate:", 0) == 0) {
            found.limits     = checked_gate_limits(one);
            found.draft_gate = true;
            continue;
        }
        const int32_t i = (int32_t) (std::find(std::begin(known), std::end(known), one) - std::begin(known));
        if (i == (int32_t) std::size(known) || (found.next_layer && i >= 2 && i - 1 != found.next_layer)) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                             spac_format("PYSPAC_PREDICT \"%s\": give one of next-layer, next-layer-2 and next-layer-3, draft-gate, or both, or none", text.c_str()));
        }
        found.next_layer = i >= 2 ? i - 1 : found.next_layer;
        found.draft_gate = found.draft_gate || i == 1;
    }
    return found;
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
    params.host_kernels       = checked_host_kernels(env_or("PYSPAC_HOST_KERNELS", "auto"));
    params.cpu_range          = env_or("PYSPAC_CPU_RANGE", nullptr);
    params.lossy              = checked("PYSPAC_LOSSY", spac_read_lossy);
    params.baseline           = checked("PYSPAC_BASELINE", spac_read_baseline);
    params.ram_bytes          = checked_ram(ctx);
    params.fill               = checked_switch("PYSPAC_FILL");
    params.evict              = checked_switch("PYSPAC_EVICT");
    read_copy_speeds(env_or("PYSPAC_COPY_GB_S", ""), params);
    params.stage = checked_switch("PYSPAC_STAGE") ? SPAC_STAGE_AUTO : SPAC_STAGE_NEVER;

    const predictors p = checked_predictors(env_or("PYSPAC_PREDICT", ""));
    params.next_layer  = p.next_layer;
    gate_limits        = p.limits;
    gates_drafts       = p.draft_gate;

    std::unique_ptr<spac_ngram_drafter> ngram;
    if (const char * n = env_or("PYSPAC_NGRAM", nullptr)) {
        ngram = std::make_unique<spac_ngram_drafter>(checked_number("PYSPAC_NGRAM", n, SPAC_DRAFT_MAX));
    }
    target = new spac_engine(ctx, params, free_with_context, make_masks(ctx), std::move(ngram), checked_max_kl()); // owned by the context
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
