#include "engine.h"

#include "clock.h"
#include "device-probe.h"
#include "engine-params.h"
#include "host/openmp-team.h"
#include "status.h"

#include "llama-model.h"
#include "llama.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <strings.h>
#include <thread>

// Forwards may go on for this long without a new decision before the scheduler counts as gone. It decides with nearly
// every step; when it died, a supervisor brings it back in a second or two, and old decisions are better than none meanwhile.
static constexpr uint64_t DECISION_LIFE_US = 10'000'000;
// of the time between two forwards, as much as may have been decoding; the rest was waiting for a request
static constexpr uint64_t FORWARD_MAX_US = 1'000'000;

// ---- attaching

spac_engine::spac_engine(llama_context * ctx, const spac_engine_params & params, void (*free_with_context)(void *)) :
    ctx(ctx), params(params), device_name(params.device ? params.device : "auto"), cache_size(params.cache ? params.cache : "auto"),
    board_name(params.board_name ? params.board_name : ""),
    cpus(params.cpu_range ? spac_parse_cpu_range(params.cpu_range) : std::vector<int>()), free_with_context(free_with_context) {
    refuse_second();
    try {
        discover_layers();
        choose_device();
        choose_kernels();
        form_groups();
        divide_pool();
        find_unpinned();
        probe_device();
        allocate_pool();
        start_threads();
        is_active = true;
        set_hook(true);
        if (!board_name.empty()) {
            board->share(board_name); // whoever finds it finds an engine at work
        }
    } catch (...) {
        remove_hook();
        throw;
    }
    if (params.verbose) {
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
}

spac_engine::~spac_engine() {
    remove_hook();
}

void spac_engine::forget_context() {
    worker.reset();
    ctx = nullptr;
}

// may be called while another exception is on its way
void spac_engine::remove_hook() {
    try {
        set_hook(false);
    } catch (const std::exception & e) { // the hook is gone all the same
        spac_log("the context could not reserve its graphs without the engine: %s", e.what());
    }
}

// two would overwrite each other's hook, and neither could be freed first
void spac_engine::refuse_second() const {
    if (llama_get_moe_hook(ctx)->build) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "this context has an engine already: free that one first (with PYSPAC_CACHE in the "
                                                       "environment each context gets one when it is made: unset it)");
    }
}

void spac_engine::set_hook(bool on) {
    if (!ctx) {
        return;
    }
    const auto forget = [](void * engine) { ((spac_engine *) engine)->forget_context(); };

    llama_moe_hook hook = {};
    hook.build          = build;
    hook.n_threads      = [](void * engine, int32_t n_tokens) { return ((spac_engine *) engine)->n_threads_of_graph(n_tokens); };
    hook.free           = free_with_context ? free_with_context : forget;
    hook.user_data      = this;
    hook.n_draft_max    = [](void * engine, int32_t server_slot) { return ((spac_engine *) engine)->n_draft_max(server_slot); };
    hook.record_step    = [](void * engine, const llama_moe_hook_step * step) { ((spac_engine *) engine)->record_step(*step); };
    llama_set_moe_hook(ctx, on ? &hook : nullptr);
}

// setting the hook makes the context reserve its graphs, which shows every layer to discover()
void spac_engine::discover_layers() {
    set_hook(true);

    std::map<std::string, int> reasons;
    int                        n_split = 0;
    for (auto & entry : states) {
        const spac_moe_layer & layer = entry.second->layer;
        n_layer                      = std::max(n_layer, layer.il + 1);
        n_expert                     = std::max(n_expert, (int32_t) layer.n_expert);
        n_expert_used                = std::max(n_expert_used, (int32_t) layer.n_expert_used);
        n_split += layer.is_split();
        if (!layer.is_split()) {
            reasons[layer.declined]++;
        }
    }
    n_layer = std::max(n_layer, llama_model_n_layer(llama_get_model(ctx)));

    if (states.empty()) {
        throw spac_dense_model();
    }
    std::string text;
    for (const auto & r : reasons) {
        text += spac_format("%s%s (%d layers)", text.empty() ? "" : "; ", r.first.c_str(), r.second);
    }
    if (n_split == 0) {
        text = "no MoE layer can be split: " + text;
        if (reasons.count(SPAC_DECLINED_CALLBACK)) {
            throw spac_stays_stock(text);
        }
        throw spac_error(SPAC_STATUS_NOTHING_TO_SPLIT, text);
    }
    if (!reasons.empty()) {
        spac_log("%zu MoE layers stay as they are: %s", states.size() - n_split, text.c_str());
    }
}

ggml_tensor * spac_engine::build(void * user_data, const llama_moe_hook_params * p) {
    spac_engine & engine = *(spac_engine *) user_data;
    if (!engine.is_active) {
        return engine.discover(*p);
    }
    engine.note_graph(*p);
    ggml_tensor * out = engine.split(*p);
    engine.n_graph_splits += out != nullptr;
    return out;
}

static std::string model_arch(llama_context * ctx) {
    char arch[64] = "";
    llama_model_meta_val_str(llama_get_model(ctx), "general.architecture", arch, sizeof(arch));
    return arch;
}

ggml_tensor * spac_engine::discover(const llama_moe_hook_params & p) {
    if (devices.empty()) {
        for (int i = 0; i < ggml_backend_sched_get_n_backends(p.sched); i++) {
            devices.push_back(ggml_backend_get_device(ggml_backend_sched_get_backend(p.sched, i)));
        }
    }
    if (p.il < 0) {
        return nullptr;
    }
    std::unique_ptr<layer_state> & state = states[p.il];
    if (!state) {
        state        = std::make_unique<layer_state>();
        state->layer = spac_moe_layer_from_hook(p, model_arch(ctx));
        state->node  = { this, &state->layer };
    } else if (!same_experts(state->layer, p)) {
        state->layer.declined = "two sets of experts in one layer";
    }
    return nullptr;
}

bool spac_engine::same_experts(const spac_moe_layer & layer, const llama_moe_hook_params & p) const {
    return layer.parts[SPAC_PART_DOWN] == p.down;
}

void spac_engine::choose_device() {
    has_slots = strcasecmp(device_name.c_str(), "none") != 0;
    device    = spac_choose_device(has_slots ? device_name : "cpu", devices);
}

void spac_engine::choose_kernels() {
    if (!has_slots && (params.host_kernels == SPAC_KERNELS_GGML || params.host_mode == SPAC_HOST_EXECUTOR)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "device \"none\" runs all experts in the graph, with the engine's own kernels: "
                                                       "it needs host_kernels auto or spac, and host_mode auto or in-graph");
    }
    const bool is_auto   = params.host_kernels == SPAC_KERNELS_AUTO && (!has_slots || !spac_device_is_cpu(device));
    const bool is_wanted = params.host_kernels == SPAC_KERNELS_SPAC || is_auto;
    kernels              = is_wanted ? spac_kernels_best() : nullptr;
    if (is_wanted && !kernels) {
        spac_log("no kernels for this processor (they need AVX2, FMA and F16C): ggml's are used");
    }

    int n_split = 0;
    for (auto & entry : states) {
        layer_state & state = *entry.second;
        state.own_kernels   = state.layer.is_split() && kernels && spac_host_experts::can_compute(*kernels, state.layer);
        if (!has_slots && !state.own_kernels && state.layer.is_split()) {
            state.layer.declined = "the engine has no kernels for it";
        }
        n_split += state.layer.is_split();
    }
    if (n_split == 0) {
        throw spac_error(SPAC_STATUS_NOTHING_TO_SPLIT, "device \"none\": the engine has kernels for no layer of this model on this machine");
    }
}

void spac_engine::form_groups() {
    std::map<std::string, int> by_key;
    for (auto & entry : states) {
        spac_moe_layer & layer = entry.second->layer;
        if (!layer.is_split()) {
            continue;
        }
        const auto [it, is_new] = by_key.emplace(layer.layout_key(), (int) by_key.size());
        layer.group             = it->second;
        if (is_new) {
            group_like.push_back(&layer);
        }
        total_bytes += layer.n_expert * layer.expert_bytes();
    }
}

void spac_engine::divide_pool() {
    const bool is_cpu = spac_device_is_cpu(device);
    if (!has_slots) {
        host_mode = SPAC_HOST_IN_GRAPH;
        group_slots.assign(group_like.size(), 0);
        return;
    }
    host_mode = params.host_mode != SPAC_HOST_AUTO ? params.host_mode : is_cpu ? SPAC_HOST_IN_GRAPH
                                                                               : SPAC_HOST_EXECUTOR;
    if (host_mode == SPAC_HOST_IN_GRAPH && !is_cpu) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("in-graph host experts need the CPU as the device, not %s", ggml_backend_dev_name(device)));
    }

    std::vector<uint64_t> bytes(group_like.size()), n_experts(group_like.size());
    for (auto & entry : states) {
        const spac_moe_layer & layer = entry.second->layer;
        if (layer.is_split()) {
            bytes[layer.group] = layer.expert_bytes();
            n_experts[layer.group] += layer.n_expert;
        }
    }
    for (size_t g = 0; g < n_experts.size(); g++) {
        n_experts[g] = std::min(n_experts[g], spac_max_slots(*group_like[g]));
    }
    const uint64_t guards = std::accumulate(bytes.begin(), bytes.end(), uint64_t(0)); // one per group
    const uint64_t budget = spac_parse_cache(cache_size, total_bytes, guards, device);
    group_slots           = spac_divide_slots(budget, bytes, n_experts);

    for (size_t g = 0; g < group_slots.size(); g++) {
        if (group_slots[g] == 0) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                             spac_format("cache \"%s\" has no room for one expert of %.2f MiB: use at least %.0f MiB", cache_size.c_str(),
                                         bytes[g] / 1048576.0, bytes[g] / 1048576.0 * group_slots.size() + 1));
        }
    }
}

// memory that is mapped, or that the driver refused to pin
void spac_engine::find_unpinned() {
    for (auto & entry : states) {
        const spac_moe_layer & layer = entry.second->layer;
        n_layer_unpinned += layer.is_split() && !spac_is_pinned(layer.parts[SPAC_PART_DOWN]->buffer, device);
    }
    if (n_layer_unpinned > 0) {
        spac_log("experts of %d layers are not in memory that %s has pinned: copies are slower (load with --load-mode none; the "
                 "driver may also have refused it)",
                 n_layer_unpinned, ggml_backend_dev_name(device));
    }
}

// a device that does not know of id -1 computes wrongly, or reads where nothing is; the CPU backend is our own
void spac_engine::probe_device() {
    if (!has_slots || spac_device_is_cpu(device)) {
        return;
    }
    for (const spac_moe_layer * layer : group_like) {
        spac_probe_device(device, *layer, params.max_batch);
    }
}

void spac_engine::allocate_pool() {
    for (size_t g = 0; has_slots && g < group_slots.size(); g++) {
        groups.push_back(std::make_unique<spac_slot_group>());
        groups[g]->like    = group_like[g];
        groups[g]->n_slots = group_slots[g];
        groups[g]->allocate(ggml_backend_dev_buffer_type(device));
    }

    int32_t n_slots = 0;
    for (int32_t n : group_slots) {
        n_slots += n;
    }
    board.reset(spac_board::create({ (uint32_t) n_layer, (uint32_t) n_expert, (uint32_t) n_expert_used, (uint32_t) n_slots,
                                     (uint32_t) params.max_batch }));

    std::vector<spac_expert_cache::layer_desc> layers(n_layer);
    for (auto & entry : states) {
        const spac_moe_layer & layer = entry.second->layer;
        if (layer.is_split()) {
            layers[layer.il]                = { layer.group, (uint32_t) layer.n_expert, layer.expert_bytes() };
            board->expert_bytes()[layer.il] = (uint32_t) layer.expert_bytes();
            board->group()[layer.il]        = layer.group;
            board->group_slots()[layer.il]  = group_slots[layer.group];
        }
    }
    cache            = std::make_unique<spac_expert_cache>(layers, group_slots, n_expert, params.evict);
    cache->residency = board->residency();
    cache->counters  = board->counters();

    if (free_with_context && has_slots) {
        std::vector<int32_t> layer_group(n_layer, -1);
        for (int il = 0; il < n_layer; il++) {
            layer_group[il] = layers[il].group;
        }
        policy = std::make_unique<spac_default_policy>(n_layer, n_expert, layer_group, group_slots);
    }

    index_of.assign(n_expert, -1);
}

void spac_engine::start_threads() {
    if (kernels && host_mode == SPAC_HOST_IN_GRAPH) {
        host_experts = std::make_unique<spac_host_experts>(*kernels);
    }
    if (!has_slots) {
        std::vector<ggml_tensor *> weights;
        for (const auto & [name, tensor] : llama_internal_get_tensor_map(llama_get_model(ctx))) {
            weights.push_back(tensor);
        }
        dense = std::make_unique<spac_dense_matmul>(weights);
        return;
    }
    if (host_mode == SPAC_HOST_EXECUTOR) {
        start_executor();
    }
    slot_copy = std::make_unique<spac_slot_copy>(device);
    worker    = std::make_unique<spac_prefetch_worker>(*cache, [this](const spac_load & load) {
        const spac_moe_layer & layer = states.at(load.il)->layer;
        const uint64_t         t0    = spac_now_us();
        slot_copy->copy(layer, load.ie, *groups[layer.group], load.slot);
        timeline.add(SPAC_SPAN_COPY, load.il, t0, spac_now_us());
        return true; }, params.copy_gb_s, [this] {
        // a server that waits for requests has no forwards to take decisions over
        apply_decision();
        if (!in_forward) {
            cache->idle();
        }
        board->publish(); });
}

// the context's, at most one per core of the range, but one core is left for copies where there are enough
int spac_engine::n_threads_of_host() const {
    const int n = cpus.empty() ? llama_n_threads(ctx) : std::min(llama_n_threads(ctx), (int) cpus.size());
    return params.n_threads > 0 ? params.n_threads : spac_device_is_cpu(device) || n <= 4 ? n
                                                                                          : n - 1;
}

void spac_engine::start_executor() {
    std::vector<const spac_moe_layer *> with_ggml;
    for (auto & entry : states) {
        if (entry.second->layer.is_split() && !entry.second->own_kernels) {
            with_ggml.push_back(&entry.second->layer);
        }
    }
    const int n_threads = n_threads_of_host();
    if (!with_ggml.empty()) {
        executor = std::make_unique<spac_ggml_worker>(with_ggml, params.max_batch, n_threads, cpus);
    }
    if (kernels) {
        const size_t n_cores = cpus.empty() ? std::thread::hardware_concurrency() : cpus.size();
        // ggml holds the graph's thread, awake on a core of its own, until the device is done
        const int  n_own          = params.n_threads > 0 ? n_threads : std::max(1, n_threads - 1);
        const bool has_spare_core = n_own + 1 < (int) n_cores;
        pool                      = std::make_unique<spac_kernel_worker>(*kernels, n_own, has_spare_core, cpus);
    }
}

spac_engine_info spac_engine::info() const {
    spac_engine_info i = {};
    i.size             = sizeof(i);
    i.is_emulated      = spac_device_is_cpu(device) || params.copy_gb_s > 0;
    i.host_mode        = host_mode;
    i.n_layer          = n_layer;
    i.n_expert         = n_expert;
    i.n_expert_used    = n_expert_used;
    i.n_group          = (int32_t) groups.size();
    i.total_bytes      = total_bytes;
    i.max_batch        = params.max_batch;
    i.n_layer_unpinned = n_layer_unpinned;
    snprintf(i.device, sizeof(i.device), "%s", has_slots ? ggml_backend_dev_name(device) : "none");
    for (auto & entry : states) {
        i.n_layer_kernels += entry.second->own_kernels;
        (entry.second->layer.is_split() ? i.n_layer_split : i.n_layer_declined)++;
    }
    snprintf(i.kernels, sizeof(i.kernels), "%s", i.n_layer_kernels > 0 ? kernels->name : "");
    for (const auto & group : groups) {
        i.n_slots += group->n_slots;
        i.pool_bytes += group->bytes;
    }
    return i;
}

const char * spac_engine::declined_reason(int il) const {
    const auto it = states.find(il);
    return it == states.end() || it->second->layer.is_split() ? nullptr : it->second->layer.declined.c_str();
}

// ---- what a server asks and tells

int32_t spac_engine::n_draft_max(int32_t server_slot) const {
    if (!board || is_abandoned) {
        return -1;
    }
    return board->n_draft_max(server_slot);
}

void spac_engine::record_step(const llama_moe_hook_step & step) {
    if (!board) {
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

// ---- graph building

// hooks see the layers of a graph from first to last
void spac_engine::note_graph(const llama_moe_hook_params & p) {
    if (p.gf != graph || p.il <= last_built_il) {
        graph          = p.gf;
        is_marked      = false;
        n_graph_splits = 0;
    }
    last_built_il = p.il;
}

int32_t spac_engine::n_threads_of_graph(int32_t n_tokens) {
    if (dense && graph && !is_marked && n_tokens > 0) {
        dense->mark(graph);
        is_marked = true;
    }
    // of a prompt's graph the last layer alone may be split: only few of its tokens get there
    const bool is_wide  = n_tokens <= 0 || n_tokens > params.max_batch;
    const bool is_split = is_active && host_mode == SPAC_HOST_EXECUTOR && !is_wide && n_graph_splits > 0;
    if (is_split && !last_was_split && executor && !spac_device_is_cpu(device)) {
        spac_end_openmp_team();
    }
    last_was_split = is_split;
    return is_split ? 1 : 0; // the context's other threads would spin in ggml's barrier while collect waits
}

ggml_tensor * spac_engine::split(const llama_moe_hook_params & p) {
    const auto it      = states.find(p.il);
    const bool is_ours = it != states.end() && it->second->layer.is_split() && same_experts(it->second->layer, p);
    const bool fits    = (!has_slots || p.cur->ne[1] <= params.max_batch) && p.n_expert_used == p.n_expert_used_sum;
    if (!is_ours || !fits) {
        return nullptr;
    }
    layer_state & state = *it->second;
    if (p.has_lora) {
        if (logged.insert(p.il).second) {
            spac_log("layer %d stays as it is: a LoRA adapter touches its experts", p.il);
        }
        return nullptr;
    }
    if (!has_slots) {
        return spac_build_split_kernels(p, &state.node, nullptr);
    }
    const spac_slot_group & group = *groups[state.layer.group];
    if (state.own_kernels && host_mode == SPAC_HOST_IN_GRAPH) {
        return spac_build_split_kernels(p, &state.node, &group);
    }
    return host_mode == SPAC_HOST_EXECUTOR ? spac_build_split_executor(p, &state.node, group) : spac_build_split_in_graph(p, &state.node, group);
}

// ---- while the graph runs

void spac_engine::end_forward() {
    if (in_forward) {
        close_forward();
    }
    cache->unpin_all();
}

void spac_engine::close_forward() {
    spac_counters & c = *board->counters();
    c.n_forward++;
    c.n_forward_both += any_device && any_host;
    any_device = any_host = false;
    in_forward            = false;
    last_il               = -1;
    if (pool) {
        pool->rest();
    }
    board->publish();
}

// the last layer of the forward before stays pinned: no one waited for the device yet
void spac_engine::begin_forward() {
    if (in_forward) {
        close_forward();
    }
    in_forward    = true;
    last_dispatch = 0;
    cache->begin_forward();
    take_decision();
}

void spac_engine::take_decision() {
    const uint64_t now = spac_now_us();
    undecided_us += std::min(now - t_last_forward, FORWARD_MAX_US);
    t_last_forward = now;

    apply_decision();
    if (board->is_shared() && is_scheduled && !is_abandoned && undecided_us > DECISION_LIFE_US) {
        is_abandoned = true;
        spac_log("no decision for %.0f s of decoding: the scheduler is gone or hangs; until it is back %sdrafts have no limit",
                 DECISION_LIFE_US / 1e6, policy ? "the engine's own policy decides, and " : "");
    }
    if (policy && (!is_scheduled || is_abandoned)) {
        run_default_policy();
    }
}

void spac_engine::run_default_policy() {
    policy->update(board->counts(), board->residency());
    cache->apply(policy->utility.data(), policy->tau.data(), policy->load.data(), policy->load.size(), UINT64_MAX);
}

// nothing that is read here is trusted: the board may be written by another process
bool spac_engine::apply_decision() {
    std::lock_guard<std::mutex> lock(decision_mutex);
    if (!board->read_decision(decision_seen, decision)) {
        return false;
    }
    decision_seen = decision.seq;
    is_scheduled  = true;
    undecided_us  = 0;
    if (is_abandoned.exchange(false)) {
        spac_log("the scheduler decides again");
    }
    if (has_slots) {
        cache->apply(decision.utility.data(), decision.tau.data(), decision.load.data(), decision.load.size(), decision.byte_budget);
    }
    return true;
}

void spac_engine::begin_layer(int il, uint64_t now) {
    if (!in_forward || il <= last_il) {
        begin_forward();
    } else {
        // this layer's input depends on the previous layer's output, so its experts are no longer in use
        cache->unpin_all();
        board->layer_stats()[last_il].layer_us += now - last_dispatch;
    }
    last_il       = il;
    last_dispatch = now;
}

static int32_t id_at(const ggml_tensor * ids, int64_t iu, int64_t it) {
    return *(const int32_t *) ((const char *) ids->data + iu * ids->nb[0] + it * ids->nb[1]);
}

// fills distinct and n_rows; O(n_expert_used * n_tokens)
size_t spac_engine::count_activations(const spac_moe_layer & layer, const ggml_tensor * ids) {
    uint32_t * counts = board->counts() + (size_t) layer.il * n_expert;

    for (int32_t ie : distinct) {
        index_of[ie] = -1;
    }
    distinct.clear();
    n_rows.clear();
    for (int64_t it = 0; it < ids->ne[1]; it++) {
        for (int64_t iu = 0; iu < ids->ne[0]; iu++) {
            const int32_t ie = id_at(ids, iu, it);
            if (ie < 0 || ie >= layer.n_expert) {
                continue;
            }
            if (index_of[ie] < 0) {
                index_of[ie] = (int32_t) distinct.size();
                distinct.push_back(ie);
                n_rows.push_back(0);
            }
            n_rows[index_of[ie]]++;
            counts[ie]++;
        }
    }
    return distinct.size();
}

void spac_engine::record_split(const spac_moe_layer & layer, size_t n_distinct) {
    spac_layer_stats & s = board->layer_stats()[layer.il];
    s.n_calls++;
    for (size_t i = 0; i < n_distinct; i++) {
        if (slots[i] >= 0) {
            s.n_device_experts++;
            s.n_device_rows += n_rows[i];
            any_device = true;
        } else {
            s.n_host_experts++;
            s.n_host_rows += n_rows[i];
            any_host = true;
        }
    }
}

void spac_engine::dispatch(spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * cur, int32_t * ids_device, int32_t * ids_host) {
    const uint64_t t0 = spac_now_us();
    begin_layer(layer.il, t0);

    const size_t n = count_activations(layer, ids);
    slots.resize(n);
    cache->pin(layer.il, distinct.data(), n_rows.data(), n, slots.data());
    record_split(layer, n);

    const int64_t n_used = ids->ne[0], n_tokens = ids->ne[1];
    ids_copy.resize(n_used * n_tokens);
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        const int32_t ie   = id_at(ids, i % n_used, i / n_used);
        const bool    ok   = ie >= 0 && ie < layer.n_expert; // else nobody computes it: the row is zero
        const int32_t slot = ok ? slots[index_of[ie]] : -1;
        ids_device[i]      = slot;
        ids_host[i]        = slot < 0 && ok ? ie : -1;
        ids_copy[i]        = ok ? ie : 0;
    }
    if (host_mode == SPAC_HOST_EXECUTOR) {
        state_of(layer).t_submit = spac_now_us();
        worker_of(layer).submit(&layer, cur, ids_host, ids_copy.data(), (int) n_tokens);
    }
    state_of(layer).t_dispatch = state_of(layer).t_device = spac_now_us();
    board->counters()->dispatch_us += state_of(layer).t_dispatch - t0;
    timeline.add(SPAC_SPAN_DISPATCH, layer.il, t0, state_of(layer).t_dispatch);
}

void spac_engine::collect(spac_moe_layer & layer, float * rows, size_t n_rows) {
    const uint64_t t0        = spac_now_us();
    uint64_t       busy_us   = 0;
    const float *  host_rows = worker_of(layer).wait(busy_us);
    memcpy(rows, host_rows, n_rows * layer.n_embd * sizeof(float));
    const uint64_t      t1    = spac_now_us();
    const layer_state & state = state_of(layer);
    board->counters()->wait_us += t1 - t0;
    board->layer_stats()[layer.il].host_us += busy_us;
    timeline.add(SPAC_SPAN_DEVICE, layer.il, state.t_dispatch, t0);
    timeline.add(SPAC_SPAN_HOST, layer.il, state.t_submit, state.t_submit + busy_us);
    timeline.add(SPAC_SPAN_COLLECT, layer.il, t0, t1);
}

spac_host_worker & spac_engine::worker_of(const spac_moe_layer & layer) {
    return state_of(layer).own_kernels ? (spac_host_worker &) *pool : *executor;
}

void spac_engine::plan_host(spac_moe_layer & layer, const int32_t * ids_host, int64_t n_tokens, int n_threads) {
    host_experts->plan(layer, ids_host, n_tokens, n_threads);
}

void spac_engine::compute_host(spac_moe_layer &, const ggml_tensor * cur, float * rows) {
    host_experts->work({ (const char *) cur->data, cur->nb[1], cur->nb[2] }, rows);
}

void spac_engine::device_done(spac_moe_layer & layer) {
    layer_state & state = state_of(layer);
    state.t_device      = spac_now_us();
    board->layer_stats()[layer.il].device_us += state.t_device - state.t_dispatch;
}

void spac_engine::host_done(spac_moe_layer & layer) {
    board->layer_stats()[layer.il].host_us += spac_now_us() - state_of(layer).t_device;
}
