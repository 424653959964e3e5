#include "prompt-stage.h"

#include "base/clock.h"

#include <algorithm>
#include <numeric>

static std::vector<std::unique_ptr<spac_staged_loads>> make_loads(const spac_device_caches & cache) {
    std::vector<std::unique_ptr<spac_staged_loads>> loads;
    for (spac_expert_cache * c : cache.all()) {
        loads.push_back(std::make_unique<spac_staged_loads>(*c));
    }
    return loads;
}

spac_prompt_stage::spac_prompt_stage(spac_board & board, const spac_device_caches & cache, spac_prompt_counts & prompts, const spac_layers & layers,
                                     const spac_slot_groups & groups, const std::vector<ggml_backend_dev_t> & devices, int stage) :
    board(board), cache(cache), loads(make_loads(cache)), prompts(prompts), groups(groups), devices(devices), mode(!devices.empty() && can_stage() ? stage : (int) SPAC_STAGE_NEVER) {
    prompts.on_layer = [this](int il) { way.note_layer(il, spac_now_us()); };
    for (const spac_moe_layer * layer : layers.split()) {
        nodes[layer->il] = { this, layer };
    }
}

bool spac_prompt_stage::can_stage() const {
    return std::all_of(loads.begin(), loads.end(), [](const auto & of_device) { return of_device->can_stage(); });
}

// ---- building

// llama.cpp computes batches on the host that are too narrow to be worth the copies; the device says which
bool spac_prompt_stage::is_taken_over(const llama_moe_hook_params & p) const {
    ggml_tensor * in = ggml_reshape_3d(p.ctx, p.cur, p.cur->ne[0], 1, p.cur->ne[1]);
    ggml_tensor * op = ggml_mul_mat_id(p.ctx, p.up ? p.up : p.gate_up, in, p.ids);
    return std::all_of(devices.begin(), devices.end(), [&](ggml_backend_dev_t device) { return ggml_backend_dev_offload_op(device, op); });
}

// a layer whose chosen experts are all in slots by the time that dispatch returns
ggml_tensor * spac_prompt_stage::build_staged(const llama_moe_hook_params & p, node & n) {
    ggml_tensor * args[] = { p.ids };
    ggml_tensor * ids    = ggml_custom_4d(p.ctx, GGML_TYPE_I32, n.layer->n_expert_used, p.cur->ne[1], 1, 1, args, 1, run_node, 1, &n);
    ggml_backend_sched_set_tensor_backend(p.sched, ids, p.backend_cpu);
    ggml_format_name(ids, "spac_stage-%d", p.il);
    return spac_build_experts(p, *n.layer, groups[n.layer->group]->parts, ids, false);
}

ggml_tensor * spac_prompt_stage::build(const llama_moe_hook_params & p, bool is_first) {
    const auto it = nodes.find(p.il);
    if (mode == SPAC_STAGE_NEVER || it == nodes.end() || !spac_same_experts(*it->second.layer, p) || p.has_lora) {
        return nullptr;
    }
    if (is_first) {
        const bool has_room = can_stage(); // beside whole layers
        way.choose(has_room && mode == SPAC_STAGE_ALWAYS, has_room && (mode == SPAC_STAGE_ALWAYS || is_taken_over(p)), p.cur->ne[1]);
    }
    return way.is_staged ? build_staged(p, it->second) : nullptr;
}

// ---- while the graph runs

// src: ids; dst: slots
void spac_prompt_stage::run_node(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        const node & n = *(node *) user_data;
        n.stage->dispatch(*n.layer, dst->src[0], (int32_t *) dst->data);
    }
}

void spac_prompt_stage::begin(int64_t n_tokens, bool ends_narrow, const std::vector<int32_t> & whole) {
    staged.clear();
    for (const auto & [il, node] : nodes) {
        if (whole[il] < 0) {
            staged.push_back(node.layer);
        }
    }
    // the last layer of a prompt may be computed for few of its tokens, as a batch of their size is
    way.last_il = staged.empty() ? -1 : staged[staged.size() < 2 ? 0 : staged.size() - 2]->il;
    way.begin(n_tokens, spac_now_us());
    if (ends_narrow && !staged.empty()) {
        staged.pop_back();
    }
    stage_after(-1);
}

void spac_prompt_stage::stage_after(int il) {
    const auto next = std::find_if(staged.begin(), staged.end(), [&](const spac_moe_layer * layer) { return layer->il > il; });
    if (way.is_staged && next != staged.end()) {
        stage(**next);
    }
}

// all of its experts, those first that prompts used most so far: which ones it will use, its router has not said yet
void spac_prompt_stage::stage(const spac_moe_layer & layer) {
    const uint32_t *     counts = board.prompt_counts() + (size_t) layer.il * board.geometry().n_expert;
    std::vector<int32_t> experts(layer.n_expert);
    std::iota(experts.begin(), experts.end(), 0);
    std::stable_sort(experts.begin(), experts.end(), [&](int32_t a, int32_t b) { return counts[a] > counts[b]; });
    loads[cache.index_of(layer.il)]->stage(layer.il, experts.data(), experts.size());
}

// The layers before are computed: these ids depend on them, and so no slot is in use.
void spac_prompt_stage::dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, int32_t * slots) {
    cache.unpin_all();
    const spac_activations & used      = prompts.count(layer, ids);
    spac_staged_loads &      of_device = *loads[cache.index_of(layer.il)];
    of_device.stage(layer.il, used.experts.data(), used.n_distinct());
    stage_after(layer.il);
    const uint64_t t0 = spac_now_us();
    slots_of.resize(used.n_distinct());
    of_device.pin(layer.il, used.experts.data(), slots_of.size(), slots_of.data());
    board.counters()->stage_wait_us += spac_now_us() - t0;
    prompts.fill(layer, ids->ne[1]);

    const int64_t n_used = ids->ne[0], n = n_used * ids->ne[1];
    for (int64_t i = 0; i < n; i++) {
        const int32_t ie = spac_id_at(ids, i % n_used, i / n_used);
        slots[i]         = ie >= 0 && ie < layer.n_expert ? slots_of[used.index_of[ie]] : -1;
    }
}
