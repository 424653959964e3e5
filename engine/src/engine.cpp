#include "engine.h"

#include "base/clock.h"
#include "base/status.h"

#include "llama-batch.h"
#include "llama-model.h"
#include "llama.h"

#include <cassert>
#include <numeric>
#include <vector>

// ---- attaching

static spac_slot_groups make_slots(const spac_plan & plan, const spac_layers & layers) {
    if (!plan.has_slots) {
        return {};
    }
    return spac_make_slots(layers.group_like, plan.group_slots, plan.devices);
}

static void describe_devices(spac_board & board, const spac_plan & plan, const spac_layers & layers, const spac_slot_groups & slots) {
    for (size_t d = 0; d < plan.devices.size(); d++) {
        spac_device_stats & s = board.devices()[d];
        snprintf(s.name, sizeof(s.name), "%s", plan.has_slots ? ggml_backend_dev_name(plan.devices[d]) : "none");
        s.is_emulated = plan.has_slots && spac_device_is_cpu(plan.devices[d]);
        s.is_in_graph = plan.host_mode == SPAC_HOST_IN_GRAPH;
    }
    for (const auto & group : slots) {
        spac_device_stats & s = board.devices()[group->like->device];
        s.n_slots += group->n_slots;
        s.pool_bytes += group->bytes;
    }
    for (const spac_moe_layer * layer : layers.split()) {
        board.layer_device()[layer->il] = layer->device;
        board.devices()[layer->device].expert_bytes += layer->n_expert * layer->expert_bytes();
    }
}

// GPUs are done when collect begins, an emulated device, too; others, such as RPC's, may only have been told what to do
static spac_device_clock device_clock_of(const spac_plan & plan, const spac_slot_groups & slots) {
    spac_device_clock clock;
    clock.speed = plan.speed;
    if (plan.host_mode == SPAC_HOST_EXECUTOR && !plan.any_is_cpu()) {
        clock.slots = &slots;
    }
    return clock;
}

static std::unique_ptr<spac_board> make_board(const spac_plan & plan, const spac_layers & layers, const spac_slot_groups & slots, int32_t max_batch) {
    const int32_t n_slots = std::accumulate(plan.group_slots.begin(), plan.group_slots.end(), 0);
    // of a dense model as of one with an expert per layer that is never asked for: boards, and who reads them, have no other form
    const auto                  at_least_1 = [](int32_t n) { return (uint32_t) std::max(1, n); };
    std::unique_ptr<spac_board> board(spac_board::create({ at_least_1(layers.n_layer), at_least_1(layers.n_expert), at_least_1(layers.n_expert_used),
                                                           (uint32_t) n_slots, (uint32_t) max_batch, (uint32_t) plan.devices.size() }));
    describe_devices(*board, plan, layers, slots);
    for (const spac_moe_layer * layer : layers.split()) {
        board->expert_bytes()[layer->il] = (uint32_t) layer->expert_bytes();
        board->group()[layer->il]        = layer->group;
        board->group_slots()[layer->il]  = plan.group_slots[layer->group];
    }
    return board;
}

// of one device: the layers of others are not split for it
static std::vector<spac_expert_cache::layer_desc> describe(const spac_layers & layers, const spac_plan & plan, const spac_slot_groups & slots, size_t device,
                                                           bool has_tier) {
    std::vector<spac_expert_cache::layer_desc> descs(layers.n_layer);
    for (const spac_moe_layer * layer : layers.split()) {
        if (layer->device == (int) device) {
            // Where the engine's own kernels compute the device's experts, too, a whole layer would have other kernels. With
            // experts on disk the host computes wide batches.
            const bool has_own      = spac_device_is_cpu(plan.device_of(*layer)) && layer->own_kernels;
            const bool can_be_whole = plan.has_slots && !has_tier && !has_own && slots[layer->group]->can_begin_at(layer->n_expert);
            descs[layer->il]        = { layer->group, (uint32_t) layer->n_expert, layer->expert_bytes(), can_be_whole };
        }
    }
    return descs;
}

// indices of groups are those of all; of another device's a cache has no slots
std::vector<std::unique_ptr<spac_expert_cache>> spac_engine::make_caches() {
    std::vector<std::unique_ptr<spac_expert_cache>> caches;
    for (size_t d = 0; d < plan.devices.size(); d++) {
        std::vector<int32_t> n_slots(plan.group_slots.size(), 0);
        for (size_t g = 0; g < n_slots.size(); g++) {
            n_slots[g] = layers.group_like[g]->device == (int) d ? plan.group_slots[g] : 0;
        }
        const spac_expert_cache::published out   = { board->residency(), board->counters(), board->ahead(), board->whole(), board->devices() + d, &cache_mutex };
        const auto                         descs = describe(layers, plan, slots, d, settings.params.ram_bytes > 0);
        caches.push_back(std::make_unique<spac_expert_cache>(descs, n_slots, std::max(1, layers.n_expert), settings.params.evict, out));
    }
    return caches;
}

static spac_settings settings_of(const spac_engine_params & params) {
    spac_settings settings(params);
    const bool    has_copies = !spac_lossy(settings.lossy).copies().empty();
    if (has_copies && params.host_kernels == SPAC_KERNELS_GGML) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("ggml's kernels cannot compute experts of a copy (lossy \"%s\"): give host_kernels auto or spac",
                                                                   settings.lossy.c_str()));
    }
    if (has_copies) {
        settings.params.host_kernels = SPAC_KERNELS_SPAC;
    }
    if (!settings.baseline.empty()) { // misses are what fills the slots then
        settings.params.fill  = false;
        settings.params.stage = SPAC_STAGE_NEVER;
    }
    return settings;
}

static spac_baseline baseline_of(const spac_settings & settings) {
    return { "baseline", settings.baseline };
}

bool spac_engine::is_scheduled() const {
    return plan.has_slots && (demand.empty() || baseline_of(settings).is_scheduled());
}

std::vector<std::unique_ptr<spac_demand_loads>> spac_engine::make_demand() const {
    const spac_baseline                             baseline = baseline_of(settings);
    std::vector<std::unique_ptr<spac_demand_loads>> found;
    if (!baseline.is_on()) {
        return found;
    }
    const auto refuse = [&](const char * why) { throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("baseline \"%s\" %s", settings.baseline.c_str(), why)); };
    if (!plan.has_slots) {
        refuse("needs a device: there is nothing to copy to");
    }
    if (settings.params.ram_bytes > 0) {
        refuse("needs all experts in memory: leave out ram");
    }
    if (settings.params.next_layer > 0 && !baseline.is_scheduled()) {
        refuse("goes without a predictor: leave out next-layer");
    }
    for (const auto & one : cache_of) {
        found.push_back(std::make_unique<spac_demand_loads>(*one, baseline));
    }
    return found;
}

static std::vector<spac_demand_loads *> pointers_to(const std::vector<std::unique_ptr<spac_demand_loads>> & demand) {
    std::vector<spac_demand_loads *> all;
    for (const auto & one : demand) {
        all.push_back(one.get());
    }
    return all;
}

static spac_device_caches all_of(const std::vector<std::unique_ptr<spac_expert_cache>> & cache_of, const spac_board & board) {
    std::vector<spac_expert_cache *> caches;
    for (const auto & cache : cache_of) {
        caches.push_back(cache.get());
    }
    return { caches, std::vector<uint32_t>(board.layer_device(), board.layer_device() + board.geometry().n_layer) };
}

static std::unique_ptr<spac_default_policy> make_policy(const spac_plan & plan, const spac_layers & layers) {
    std::vector<int32_t> layer_group(layers.n_layer, -1);
    for (const spac_moe_layer * layer : layers.split()) {
        layer_group[layer->il] = layer->group;
    }
    return std::make_unique<spac_default_policy>(layers.n_layer, layers.n_expert, layer_group, plan.group_slots);
}

static std::unique_ptr<spac_dense_matmul> make_dense(llama_context * ctx, const spac_kernels * kernels) {
    std::vector<ggml_tensor *> weights;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(llama_get_model(ctx))) {
        weights.push_back(tensor);
    }
    return std::make_unique<spac_dense_matmul>(weights, kernels);
}

static std::unique_ptr<spac_next_layer> make_next_layer(spac_board & board, const spac_device_caches & cache, const spac_layers & layers, const spac_plan & plan,
                                                        spac_memory_tier * tier, const spac_engine_params & params) {
    if (params.next_layer == 0) {
        return nullptr;
    }
    if (!plan.has_slots && !tier) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "next-layer needs a device, or experts on disk (ram): else no expert is ever copied; leave the predictor "
                                                       "out, or give one of them");
    }
    return std::make_unique<spac_next_layer>(board, cache, layers.split(), params.next_layer, tier);
}

static std::unique_ptr<spac_memory_tier> make_tier(const spac_plan & plan, const spac_layers & layers, const spac_settings & settings) {
    if (settings.params.ram_bytes == 0) {
        return nullptr;
    }
    if (!layers.any_split()) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "experts on disk (ram) need experts that the engine's own kernels compute: this model has none");
    }
    return std::make_unique<spac_memory_tier>(layers.split(), settings.params.ram_bytes, plan.has_slots);
}

static spac_lossy make_lossy(const spac_plan & plan, const spac_memory_tier * tier, const std::string & text) {
    spac_lossy lossy(text);
    if (lossy.is_on() && !plan.has_slots && !tier) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("lossy \"%s\" needs a device, or experts on disk (ram): else every expert is there", text.c_str()));
    }
    if (lossy.substitutes() && !plan.has_slots) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("lossy \"%s\" needs a device, whose experts stand in for others: give drop:N", text.c_str()));
    }
    return lossy;
}

static void check_can_copy(const spac_plan & plan, const std::vector<const spac_moe_layer *> & split) {
    for (const spac_moe_layer * layer : split) {
        if (!layer->own_kernels) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("a copy of the experts (lossy) needs the engine's own kernels, which layer %d is not for%s: give drop:N",
                                                                       layer->il, plan.kernels ? ": it has none for its types" : " on this processor"));
        }
    }
}

// each layer leads to its copies, one after the other
static std::vector<std::unique_ptr<spac_expert_copy>> make_copies(spac_layers & layers, const spac_plan & plan, const spac_lossy & lossy) {
    std::vector<std::unique_ptr<spac_expert_copy>> copies;
    if (!lossy.copies().empty()) {
        check_can_copy(plan, layers.split());
    }
    for (const std::string & path : lossy.copies()) {
        copies.push_back(std::make_unique<spac_expert_copy>(path, layers.split()));
        for (auto & [il, copy] : copies.back()->by_il) {
            for (int part = 0; part < SPAC_PART_UP_B; part++) {
                const ggml_tensor * t = copy.parts[part];
                if (t && !plan.kernels->dot(t->type)) {
                    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s: the engine has no kernels for %s (%s): give another quantisation",
                                                                               path.c_str(), ggml_type_name(t->type), t->name));
                }
            }
            spac_moe_layer & before = copies.size() == 1 ? layers.by_il.at(il) : copies[copies.size() - 2]->by_il.at(il);
            before.copy             = &copy;
        }
        copies.back()->load();
    }
    return copies;
}

std::unique_ptr<spac_exact_sample> spac_engine::make_samples(double max_kl) {
    if (max_kl <= 0) {
        return nullptr;
    }
    const auto refuse = [](const char * why) { throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_MAX_KL (--max-kl) %s", why)); };
    if (!forward.is_lossy()) {
        refuse("limits what a lossy mode costs: give PYSPAC_LOSSY (--lossy), too, or omit it");
    }
    if (masks) {
        refuse("does not go with drafts by mask tokens, whose batches cannot be computed twice: omit one");
    }
    const double price = forward.choice_wanted() ? spac_kl_limit::PRICE_ROUTE : spac_kl_limit::PRICE;
    auto         made  = std::make_unique<spac_exact_sample>(hook.ctx, max_kl, price, settings.params.max_batch);
    made->may_be_lossy = [this](int32_t sequence) { return forward.may_be_lossy(sequence); };
    made->begin_pass   = [this](bool is_exact, bool is_counted) {
        wait_for_stream(); // which asks for the last graph's
        forward.is_exact         = is_exact;
        forward.n_tokens_counted = log.n_tokens_counted = is_counted ? INT64_MAX : 0;
    };
    made->take_share_left_out = [this] { return forward.take_share_left_out(); };
    made->end_batch           = [this] { show_divergence(); };
    return made;
}

void spac_engine::show_divergence() {
    spac_counters & c = *board->counters();
    c.n_kl_tokens     = samples->limit.n_tokens;
    c.kl_total        = llround(samples->limit.spent * 1e6);
    c.n_kl_samples    = samples->limit.n_samples;
    c.kl_sampled      = llround(samples->limit.sampled * 1e6);
}

// the worker publishes between forwards where there is one
static int il_to_publish(const spac_plan & plan, const spac_layers & layers) {
    const auto split = layers.split();
    return plan.has_slots || split.empty() ? -1 : split.back()->il;
}

spac_engine::spac_engine(llama_context * ctx, const spac_engine_params & params, void (*free_with_context)(void *),
                         std::unique_ptr<spac_mask_drafter> mask_drafter, std::unique_ptr<spac_ngram_drafter> ngram_drafter, double max_kl) :
    settings(settings_of(params)),
    masks(std::move(mask_drafter)),
    ngram(std::move(ngram_drafter)),
    hook(ctx),
    layers(hook),
    plan(spac_make_plan(settings, layers)),
    slots(make_slots(plan, layers)),
    board(make_board(plan, layers, slots, settings.params.max_batch)),
    cache_of(make_caches()),
    cache(all_of(cache_of, *board)),
    demand(make_demand()),
    tier(make_tier(plan, layers, settings)),
    lossy(make_lossy(plan, tier.get(), settings.lossy)),
    copies(make_copies(layers, plan, lossy)),
    decisions(*board, is_scheduled() ? cache : spac_device_caches(), plan.has_slots ? nullptr : tier.get(),
              free_with_context && is_scheduled() ? make_policy(plan, layers) : nullptr),
    host(plan, layers, settings, llama_n_threads(ctx), tier.get()),
    dense(plan.has_slots ? nullptr : make_dense(ctx, plan.kernels)),
    team(plan.has_slots ? nullptr : std::make_unique<spac_team_watch>(llama_n_threads(ctx))),
    log(*board),
    forward(*board, plan.has_slots || tier ? cache : spac_device_caches(), decisions, host, tier.get(), timeline, log,
            lossy, pointers_to(demand), settings.params.fill,
            il_to_publish(plan, layers), device_clock_of(plan, slots)),
    samples(make_samples(max_kl)),
    prompts(*board, cache, layers, log, settings.params.fill),
    untried(*board, cache, prompts, layers, slots, plan.has_slots && !tier ? plan.devices : std::vector<ggml_backend_dev_t>(), settings.params.stage),
    wide(*board, layers, host, tier.get()),
    next_layer(make_next_layer(*board, cache, layers, plan, tier.get(), settings.params)),
    splitter(plan, layers, slots, host, dense.get(), forward, prompts, untried, log, next_layer.get(), wide, board->declined(),
             settings.params.max_batch),
    head_states(ctx) {
    try {
        if (tier) {
            tier->show(*board);
        }
        if (masks) {
            masks->count_first = [this](int32_t n_tokens) { count_first(n_tokens); };
        }
        if (ngram) {
            ngram->limit = [this](int32_t server_slot, int32_t n_matched) { return decisions.n_draft_max(server_slot, n_matched); };
        }
        show_info();
        decisions.want_whole = [this](const uint8_t * wanted) { untried.want_whole(wanted); };
        hook.set(make_hook(free_with_context)); // from here on the graphs that the context builds are split
        if (const int n = splitter.n_as_chosen()) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("lossy \"%s\" needs routers that choose by their logits only, which %d layers of this "
                                                                       "model do not: give drop:N or substitute:X",
                                                                       settings.lossy.c_str(), n));
        }
        if (!settings.board_name.empty()) {
            share_board(); // whoever finds it finds an engine at work
        }
        start_workers();
    } catch (...) {
        hook.remove(); // before what it calls goes
        throw;
    }
    if (settings.params.verbose) {
        log_attached();
    }
}

// without slots there is nothing to decide on it
void spac_engine::share_board() {
    try {
        board->share(settings.board_name);
    } catch (const spac_error & e) {
        if (plan.has_slots || e.status != SPAC_STATUS_OUT_OF_MEMORY) {
            throw;
        }
        spac_log("%s; going on without it: no scheduler, and nothing to watch", e.what());
    }
}

spac_engine::~spac_engine() {
    hook.remove();
}

void spac_engine::free(spac_engine * engine) {
    if (engine && !engine->is_away()) {
        delete engine;
    }
}

double spac_engine::copy_gb_s(size_t device) const {
    assert(plan.places[device] < SPAC_N_DEVICES); // spac_choose_devices gives no more
    const double own = settings.params.device_copy_gb_s[plan.places[device]];
    return own > 0 ? own : settings.params.copy_gb_s;
}

// the last thing: their threads look at all the rest
void spac_engine::start_workers() {
    for (size_t d = 0; plan.has_slots && d < plan.devices.size(); d++) {
        board->devices()[d].copy_gb_s = copy_gb_s(d);
        slot_copies.push_back(std::make_unique<spac_slot_copy>(plan.devices[d]));
    }
    for (size_t d = 0; d < slot_copies.size(); d++) {
        workers.push_back(std::make_unique<spac_prefetch_worker>(
            *cache_of[d], [this](const spac_load & load) { return copy_to_slot(load); }, copy_gb_s(d), [this, d] { look_around(d); }));
    }
}

// a graph that was aborted may have left host experts at work
void spac_engine::forget_context() {
    if (is_away()) {
        return;
    }
    workers.clear();
    if (next_layer) {
        next_layer->stop();
    }
    if (draft_gate) {
        draft_gate->stop();
    }
    host.stop();
    hook.forget_context();
}

void spac_engine::watch_draft(llama_context * draft, const spac_gate_limits & limits) {
    if (plan.has_slots && !is_scheduled()) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("baseline \"%s\" goes without a predictor: leave out draft-gate", settings.baseline.c_str()));
    }
    if (!plan.has_slots && !tier) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "draft-gate needs a device, or experts on disk (ram): else no expert is ever copied; give one of them, or "
                                                       "predict without");
    }
    draft_gate = std::make_unique<spac_draft_gate>(draft, *board, cache, layers.split(), llama_model_n_layer(llama_get_model(hook.ctx)), info().n_slots, settings.params.max_batch, tier.get(), limits);
}

// ---- the hook

llama_moe_hook spac_engine::make_hook(void (*free_with_context)(void *)) {
    llama_moe_hook h = {};
    h.user_data      = this;
    h.free           = free_with_context ? free_with_context : [](void * engine) { ((spac_engine *) engine)->forget_context(); };
    h.build          = [](void * engine, const llama_moe_hook_params * p) { return ((spac_engine *) engine)->build(*p); };
    h.n_threads      = [](void * engine, ggml_cgraph * graph, const llama_ubatch * ubatch) {
        if (ubatch) {
            ((spac_engine *) engine)->name_sequences(*ubatch);
        }
        return ((spac_engine *) engine)->before_graph(graph, ubatch ? (int32_t) ubatch->n_tokens : 0);
    };
    h.can_reuse   = [](void * engine) { return ((spac_engine *) engine)->can_reuse(); };
    h.has_failed  = tier ? [](void * engine) { return ((spac_engine *) engine)->tier->has_failed(); } : (bool (*)(void *)) nullptr;
    h.n_draft_max = [](void * engine, int32_t server_slot) { return ((spac_engine *) engine)->decisions.n_draft_max(server_slot); };
    h.record_step = [](void * engine, const llama_moe_hook_step * step) { ((spac_engine *) engine)->record_step(*step); };
    h.look_ahead  = [](void * engine, const llama_token * tokens, int32_t n) { ((spac_engine *) engine)->look_ahead(tokens, n); };
    h.keep_states = [](void * engine, llama_context * head, int32_t slot, llama_pos pos, int32_t row) {
        return ((spac_engine *) engine)->head_states.keep(head, slot, pos, row);
    };
    h.give_states = [](void * engine, llama_context * head, int32_t slot, llama_pos * pos, llama_pos end) {
        return ((spac_engine *) engine)->head_states.give(head, slot, pos, end);
    };
    h.begin_request = [](void * engine, int32_t slot, bool is_exact) { ((spac_engine *) engine)->forward.begin_request(slot, is_exact); };
    h.weight_kept   = [](void * engine, int32_t slot) { return ((spac_engine *) engine)->forward.share_kept(slot); };
    h.forget        = [](void * engine, int32_t slot, bool is_replaced) { ((spac_engine *) engine)->forget(slot, is_replaced); };
    if (masks) {
        h.draft = [](void * engine, int32_t slot, const llama_token *, int32_t, llama_token id_last, llama_pos pos, int32_t n_max, const llama_token ** drafted) {
            return ((spac_engine *) engine)->masks->draft(slot, id_last, pos, n_max, drafted);
        };
        h.process = [](void * engine, llama_batch_ext * batch) { return ((spac_engine *) engine)->masks->process(batch); };
    } else if (samples) {
        h.process = [](void * engine, llama_batch_ext * batch) { return ((spac_engine *) engine)->samples->process(batch); };
    }
    if (ngram) {
        h.draft = [](void * engine, int32_t slot, const llama_token * tokens, int32_t n, llama_token id_last, llama_pos, int32_t n_max, const llama_token ** drafted) {
            return ((spac_engine *) engine)->ngram->draft(slot, tokens, n, id_last, n_max, drafted);
        };
    }
    return h;
}

void spac_engine::forget(int32_t server_slot, bool is_replaced) {
    if (masks) {
        masks->forget(server_slot);
    }
    if (ngram) {
        ngram->forget(server_slot);
    }
    if (is_replaced) {
        head_states.drop(server_slot);
    }
}

void spac_engine::look_ahead(const llama_token * tokens, int32_t n_tokens) {
    if (board->is_asked_ahead()) {
        board->look_ahead(tokens, n_tokens);
    }
}

ggml_tensor * spac_engine::build(const llama_moe_hook_params & p) {
    return is_away() || !p.ids ? nullptr : splitter.build(p);
}

bool spac_engine::can_reuse() const {
    return is_away() || splitter.can_reuse();
}

// a token of several sequences is exact where the first is
void spac_engine::name_sequences(const llama_ubatch & ubatch) {
    if (is_away() || !forward.is_lossy()) {
        return;
    }
    wait_for_stream(); // which asks for the last graph's
    std::vector<int32_t> of_tokens, of_outputs;
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        of_tokens.push_back(ubatch.n_seq_id[i] > 0 ? ubatch.seq_id[i][0] : -1);
        if (ubatch.output && ubatch.output[i]) {
            of_outputs.push_back(of_tokens.back());
        }
    }
    forward.name_sequences(std::move(of_tokens), std::move(of_outputs));
}

// else the first split layer's dispatch begins a forward
int32_t spac_engine::before_graph(ggml_cgraph * graph, int32_t n_tokens) {
    if (is_away()) {
        spac_log("%s", spac_home_process::ELSEWHERE);
        return -1;
    }
    if (plan.devices.size() > 1) { // else the first would begin this forward, and unpin slots, while the others are at the last one
        splitter.wait_for_devices();
    }
    const bool calls_nobody = splitter.enter(n_tokens);
    if (calls_nobody && forward.is_running()) {
        wait_for_stream(); // for the forward before, which may have called
    }
    if (calls_nobody || (!layers.any_split() && n_tokens > 0)) {
        forward.begin();
    }
    if (tier) {
        host.abandon();        // it waits for what is being read
        tier->begin_forward(); // before the first node: it would be aborted otherwise
    }
    const int32_t n_threads = splitter.n_threads_of(graph, n_tokens);
    return n_threads == 0 && team && n_tokens > 0 ? n_threads_beside_others(n_tokens) : n_threads;
}

int32_t spac_engine::n_threads_beside_others(int32_t n_tokens) {
    spac_thread_info & info = *board->threads();
    info.n_most             = n_tokens > 1 ? llama_n_threads_batch(hook.ctx) : llama_n_threads(hook.ctx);
    info.n_threads          = team->n_threads(info.n_most, n_tokens);
    info.is_crowded         = team->seen().is_crowded();
    info.share              = team->seen().share();
    info.n_moves            = team->n_moves();
    return info.n_threads;
}

void spac_engine::wait_for_stream() {
    if (plan.host_mode == SPAC_HOST_IN_STREAM && hook.ctx) {
        llama_synchronize(hook.ctx);
    }
}

void spac_engine::end_forward() {
    wait_for_stream();
    forward.end();
}

void spac_engine::count_first(int32_t n_tokens) {
    const int64_t n_counted = n_tokens > 0 ? n_tokens : INT64_MAX;
    if (n_counted != forward.n_tokens_counted) {
        wait_for_stream(); // which counts the tokens of the forward before
        forward.n_tokens_counted = log.n_tokens_counted = n_counted;
    }
}

void spac_engine::record_step(const llama_moe_hook_step & step) {
    end_forward(); // its logits were read

    spac_step_record record = {};
    record.step             = *board->n_records();
    record.server_slot      = step.server_slot;
    record.request          = step.request;
    record.n_draft          = step.n_draft;
    record.n_accepted       = step.n_accepted;
    record.n_tokens         = step.n_tokens;
    record.draft_us         = step.draft_us;
    record.verify_us        = step.verify_us;
    record.process_us       = step.process_us;
    if (masks) {
        record.n_masks = masks->end_step(step.server_slot, step.n_accepted);
        record.n_tokens += masks->n_masks_in_batch();
    }
    if (ngram) {
        ngram->end_step(step.server_slot, record);
    }
    board->push_record(record);
}

// ---- on the worker's thread

bool spac_engine::copy_to_slot(const spac_load & load) {
    const spac_moe_layer & layer = layers.by_il.at(load.il);
    const uint64_t         t0    = spac_now_us();
    const auto             copy  = [&](const spac_expert_parts & from) { slot_copies[layer.device]->copy(layer, from, *slots[layer.group], load.slot, load.is_staged); };
    bool                   ok    = true;
    if (!tier) {
        copy(layer.parts_of(load.ie));
    } else {
        std::lock_guard<std::mutex> lock(tier_mutex);
        if (load.left >= 0) {
            tier->left_device(load.left / layers.n_expert, load.left % layers.n_expert);
        }
        ok = tier->copy_to_device(load.il, load.ie, copy);
    }
    timeline.add(SPAC_SPAN_COPY, load.il, t0, spac_now_us());
    return ok; // no backend of ggml tells of a copy that failed: it aborts
}

// a server that waits for requests has no forwards to take decisions over
void spac_engine::look_around(size_t device) {
    decisions.take_over();
    if (!forward.is_running()) {
        cache_of[device]->idle();
    }
    board->publish(false);
}

// ---- what it is

void spac_engine::log_attached() const {
    const spac_engine_info i = info();
    if (plan.has_slots) {
        spac_log("%d of %d MoE layers split, %d slots in %d groups, %.1f of %.1f MiB on %s", i.n_layer_split,
                 i.n_layer_split + i.n_layer_declined, i.n_slots, i.n_group, i.pool_bytes / 1048576.0, i.total_bytes / 1048576.0, i.device);
    }
    if (!demand.empty()) {
        spac_log("experts come and go as %s says", settings.baseline.c_str());
    }
    if (tier) {
        const spac_tier_info t = tier->info();
        spac_log("experts stay on disk, %.1f MiB of them; memory holds %d, %.1f MiB%s", i.total_bytes / 1048576.0, t.n_slots, t.pool_bytes / 1048576.0,
                 t.is_direct ? "" : " (this file system has no O_DIRECT: reads go through the page cache)");
    }
    for (size_t k = 0; k < copies.size(); k++) {
        spac_log("a copy of the experts in memory, %.1f MiB, from %s", copies[k]->bytes() / 1048576.0, spac_lossy(settings.lossy).copies()[k].c_str());
    }
    if (i.n_layer_kernels + i.n_dense_kernels > 0) {
        spac_log("the engine's %s kernels compute the host's experts of %d layers, and %d other matrices", i.kernels, i.n_layer_kernels,
                 i.n_dense_kernels);
    }
}

// what attaching decided, for whoever reads the board
void spac_engine::show_info() const {
    *board->info() = info();
    for (int il = 0; il < layers.n_layer; il++) {
        const char * reason = layers.declined_reason(il);
        snprintf(board->declined()[il].text, sizeof(spac_reason::text), "%s", reason ? reason : "");
    }
}

spac_engine_info spac_engine::info() const {
    spac_engine_info i = {};
    i.is_emulated      = plan.has_slots && plan.any_is_cpu();
    i.n_device         = plan.has_slots ? (int32_t) plan.devices.size() : 0;
    i.host_mode        = plan.host_mode;
    i.n_layer          = layers.n_layer;
    i.n_expert         = layers.n_expert;
    i.n_expert_used    = layers.n_expert_used;
    i.n_group          = (int32_t) slots.size();
    i.total_bytes      = layers.total_bytes;
    i.max_batch        = settings.params.max_batch;
    i.n_layer_unpinned = plan.n_layer_unpinned;
    std::string names;
    for (size_t d = 0; d < plan.devices.size(); d++) {
        names += (d > 0 ? "," : "") + std::string(board->devices()[d].name);
        i.is_emulated = i.is_emulated || copy_gb_s(d) > 0;
    }
    snprintf(i.device, sizeof(i.device), "%s", names.c_str());
    for (const auto & [il, layer] : layers.by_il) {
        i.n_layer_kernels += layer.own_kernels;
        (layer.is_split() ? i.n_layer_split : i.n_layer_declined)++;
    }
    i.n_dense_kernels = dense ? (int32_t) dense->n_weights() : 0;
    snprintf(i.kernels, sizeof(i.kernels), "%s", i.n_layer_kernels + i.n_dense_kernels > 0 ? plan.kernels->name : "");
    for (const auto & group : slots) {
        i.n_slots += group->n_slots;
        i.pool_bytes += group->bytes;
    }
    return i;
}
