#include "engine.h"

#include "clock.h"
#include "status.h"

#include "llama-model.h"
#include "llama.h"

// ---- attaching

spac_engine::spac_engine(llama_context * ctx, const spac_engine_params & params, void (*free_with_context)(void *)) :
    ctx(ctx), free_with_context(free_with_context), settings(params) {
    refuse_second();
    try {
        discover_layers();
        plan   = spac_make_plan(settings, devices, layers);
        groups = plan.has_slots ? spac_make_slots(layers.group_like, plan.group_slots, ggml_backend_dev_buffer_type(plan.device)) : spac_slot_groups();
        make_board();
        make_cache();
        make_decisions();
        host = std::make_unique<spac_host_work>(plan, layers, settings, llama_n_threads(ctx));
        make_dense();
        if (plan.has_slots) {
            prompts = std::make_unique<spac_prompt_counts>(*board, *cache, layers, settings.params.fill);
        }
        forward = std::make_unique<spac_forward>(*board, *cache, *decisions, *host, timeline, settings.params.fill, plan.has_slots ? -1 : layers.split().back()->il);
        go_to_work();
        start_worker();
    } catch (...) {
        remove_hook();
        throw;
    }
    if (settings.params.verbose) {
        log_attached();
    }
}

spac_engine::~spac_engine() {
    remove_hook();
}

// a graph that was aborted may have left host experts at work
void spac_engine::forget_context() {
    worker.reset();
    host->stop();
    ctx = nullptr;
}

// two would overwrite each other's hook, and neither could be freed first
void spac_engine::refuse_second() const {
    if (llama_get_moe_hook(ctx)->build) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "this context has an engine already: free that one first (with PYSPAC_CACHE in the "
                                                       "environment each context gets one when it is made: unset it)");
    }
}

// setting the hook makes the context reserve its graphs, which shows every layer to discover()
void spac_engine::discover_layers() {
    set_hook(true);
    layers.check(llama_model_n_layer(llama_get_model(ctx)));
}

void spac_engine::make_board() {
    int32_t n_slots = 0;
    for (int32_t n : plan.group_slots) {
        n_slots += n;
    }
    board.reset(spac_board::create({ (uint32_t) layers.n_layer, (uint32_t) layers.n_expert, (uint32_t) layers.n_expert_used,
                                     (uint32_t) n_slots, (uint32_t) settings.params.max_batch }));
    for (const spac_moe_layer * layer : layers.split()) {
        board->expert_bytes()[layer->il] = (uint32_t) layer->expert_bytes();
        board->group()[layer->il]        = layer->group;
        board->group_slots()[layer->il]  = plan.group_slots[layer->group];
    }
}

void spac_engine::make_cache() {
    std::vector<spac_expert_cache::layer_desc> descs(layers.n_layer);
    for (const spac_moe_layer * layer : layers.split()) {
        descs[layer->il] = { layer->group, (uint32_t) layer->n_expert, layer->expert_bytes() };
    }
    cache            = std::make_unique<spac_expert_cache>(descs, plan.group_slots, layers.n_expert, settings.params.evict);
    cache->residency = board->residency();
    cache->counters  = board->counters();
}

void spac_engine::make_decisions() {
    std::unique_ptr<spac_default_policy> policy;
    if (free_with_context && plan.has_slots) {
        std::vector<int32_t> layer_group(layers.n_layer, -1);
        for (const spac_moe_layer * layer : layers.split()) {
            layer_group[layer->il] = layer->group;
        }
        policy = std::make_unique<spac_default_policy>(layers.n_layer, layers.n_expert, layer_group, plan.group_slots);
    }
    decisions = std::make_unique<spac_decisions>(*board, plan.has_slots ? cache.get() : nullptr, std::move(policy));
}

void spac_engine::make_dense() {
    if (plan.has_slots) {
        return;
    }
    std::vector<ggml_tensor *> weights;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(llama_get_model(ctx))) {
        weights.push_back(tensor);
    }
    dense = std::make_unique<spac_dense_matmul>(weights);
}

// the last thing: its thread looks at all the rest
void spac_engine::start_worker() {
    if (!plan.has_slots) {
        return;
    }
    slot_copy = std::make_unique<spac_slot_copy>(plan.device);
    worker    = std::make_unique<spac_prefetch_worker>(
        *cache, [this](const spac_load & load) { return copy_to_slot(load); }, settings.params.copy_gb_s, [this] { look_around(); });
}

// from here on the graphs that the context builds are split
void spac_engine::go_to_work() {
    splitter = std::make_unique<spac_graph_splitter>(plan, layers, groups, *host, dense.get(), *forward, prompts.get(), settings.params.max_batch);
    set_hook(true);
    if (!settings.board_name.empty()) {
        board->share(settings.board_name); // whoever finds it finds an engine at work
    }
}

void spac_engine::log_attached() const {
    const spac_engine_info i = info();
    spac_log("%d of %d MoE layers split, %d slots in %d groups, %.1f of %.1f MiB on %s", i.n_layer_split,
             i.n_layer_split + i.n_layer_declined, i.n_slots, i.n_group, i.pool_bytes / 1048576.0, i.total_bytes / 1048576.0, i.device);
    if (i.n_layer_kernels > 0) {
        spac_log("host experts of %d layers use the engine's %s kernels", i.n_layer_kernels, i.kernels);
    }
    if (dense) {
        spac_log("so do %zu matrices that are no experts", dense->n_weights());
    }
}

spac_engine_info spac_engine::info() const {
    spac_engine_info i = {};
    i.size             = sizeof(i);
    i.is_emulated      = plan.device_is_cpu() || settings.params.copy_gb_s > 0;
    i.host_mode        = plan.host_mode;
    i.n_layer          = layers.n_layer;
    i.n_expert         = layers.n_expert;
    i.n_expert_used    = layers.n_expert_used;
    i.n_group          = (int32_t) groups.size();
    i.total_bytes      = layers.total_bytes;
    i.max_batch        = settings.params.max_batch;
    i.n_layer_unpinned = plan.n_layer_unpinned;
    snprintf(i.device, sizeof(i.device), "%s", plan.has_slots ? ggml_backend_dev_name(plan.device) : "none");
    for (const auto & [il, layer] : layers.by_il) {
        i.n_layer_kernels += layer.own_kernels;
        (layer.is_split() ? i.n_layer_split : i.n_layer_declined)++;
    }
    snprintf(i.kernels, sizeof(i.kernels), "%s", i.n_layer_kernels > 0 ? plan.kernels->name : "");
    for (const auto & group : groups) {
        i.n_slots += group->n_slots;
        i.pool_bytes += group->bytes;
    }
    return i;
}

// ---- the hook

void spac_engine::set_hook(bool on) {
    if (!ctx) {
        return;
    }
    const auto forget    = [](void * engine) { ((spac_engine *) engine)->forget_context(); };
    const auto n_threads = [](void * engine, int32_t n_tokens) {
        spac_graph_splitter * splitter = ((spac_engine *) engine)->splitter.get();
        return splitter ? splitter->n_threads_of(n_tokens) : 0;
    };

    llama_moe_hook hook = {};
    hook.build          = build;
    hook.n_threads      = n_threads;
    hook.free           = free_with_context ? free_with_context : forget;
    hook.user_data      = this;
    hook.n_draft_max    = [](void * engine, int32_t server_slot) { return ((spac_engine *) engine)->n_draft_max(server_slot); };
    hook.record_step    = [](void * engine, const llama_moe_hook_step * step) { ((spac_engine *) engine)->record_step(*step); };
    llama_set_moe_hook(ctx, on ? &hook : nullptr);
}

// may be called while another exception is on its way
void spac_engine::remove_hook() {
    try {
        set_hook(false);
    } catch (const std::exception & e) { // the hook is gone all the same
        spac_log("the context could not reserve its graphs without the engine: %s", e.what());
    }
}

ggml_tensor * spac_engine::build(void * user_data, const llama_moe_hook_params * p) {
    spac_engine & engine = *(spac_engine *) user_data;
    if (engine.splitter) {
        return engine.splitter->build(*p);
    }
    engine.discover(*p);
    return nullptr;
}

static std::string model_arch(llama_context * ctx) {
    char arch[64] = "";
    llama_model_meta_val_str(llama_get_model(ctx), "general.architecture", arch, sizeof(arch));
    return arch;
}

void spac_engine::discover(const llama_moe_hook_params & p) {
    if (devices.empty()) {
        for (int i = 0; i < ggml_backend_sched_get_n_backends(p.sched); i++) {
            devices.push_back(ggml_backend_get_device(ggml_backend_sched_get_backend(p.sched, i)));
        }
    }
    layers.see(p, model_arch(ctx));
}

int32_t spac_engine::n_draft_max(int32_t server_slot) const {
    return decisions ? decisions->n_draft_max(server_slot) : -1;
}

void spac_engine::record_step(const llama_moe_hook_step & step) {
    if (!forward) {
        return;
    }
    end_forward(); // its logits were read

    spac_step_record record = {};
    record.step             = *board->view().n_records;
    record.server_slot      = step.server_slot;
    record.request          = step.request;
    record.n_draft          = step.n_draft;
    record.n_accepted       = step.n_accepted;
    record.n_tokens         = step.n_tokens;
    record.draft_us         = step.draft_us;
    record.verify_us        = step.verify_us;
    record.process_us       = step.process_us;
    board->push_record(record);
}

// ---- on the worker's thread

bool spac_engine::copy_to_slot(const spac_load & load) {
    const spac_moe_layer & layer = layers.by_il.at(load.il);
    const uint64_t         t0    = spac_now_us();
    slot_copy->copy(layer, load.ie, *groups[layer.group], load.slot);
    timeline.add(SPAC_SPAN_COPY, load.il, t0, spac_now_us());
    return true; // no backend of ggml tells of a copy that failed: it aborts
}

// a server that waits for requests has no forwards to take decisions over
void spac_engine::look_around() {
    decisions->take_over();
    if (!forward->is_running()) {
        cache->idle();
    }
    board->publish(false);
}
