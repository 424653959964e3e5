#include "untried.h"

#include <algorithm>

static std::vector<std::unique_ptr<spac_whole_loads>> make_loads(const spac_device_caches & cache) {
    std::vector<std::unique_ptr<spac_whole_loads>> loads;
    for (spac_expert_cache * c : cache.all()) {
        loads.push_back(std::make_unique<spac_whole_loads>(*c));
    }
    return loads;
}

spac_untried::spac_untried(spac_board & board, const spac_device_caches & cache, spac_prompt_counts & prompts, const spac_layers & layers,
                           const spac_slot_groups & groups, const std::vector<ggml_backend_dev_t> & devices, int stage) :
    groups(groups), whole(make_loads(cache)), stage(board, cache, prompts, layers, groups, devices, stage) {}

// each looks at its own layers
void spac_untried::want_whole(const uint8_t * wanted) const {
    for (const auto & of_device : whole) {
        of_device->want(wanted);
    }
}

void spac_untried::begin_graph() {
    n_built       = 0;
    built_version = 0;
    built.clear();
    for (const auto & of_device : whole) {
        uint64_t                   version_of;
        const std::vector<int32_t> first = of_device->first_slots(version_of);
        built_version += version_of;
        built.resize(first.size(), -1);
        std::transform(first.begin(), first.end(), built.begin(), built.begin(), [](int32_t a, int32_t b) { return std::max(a, b); });
    }
}

// rises whenever one of theirs does
uint64_t spac_untried::version() const {
    uint64_t sum = 0;
    for (const auto & of_device : whole) {
        sum += of_device->version();
    }
    return sum;
}

bool spac_untried::can_reuse() const {
    return built_version == version();
}

void spac_untried::enter_graph(bool is_wide) const {
    for (const auto & of_device : whole) {
        of_device->enter_graph(built, !is_wide);
    }
}

// experts in slots that follow each other, in their order: llama.cpp's own nodes, with the router's ids
ggml_tensor * spac_untried::build_whole(const llama_moe_hook_params & p, const spac_moe_layer & layer, bool on_cpu) {
    const int32_t first = layer.il < (int) built.size() ? built[layer.il] : -1;
    if (first < 0) {
        return nullptr;
    }
    n_built++;
    const spac_slot_group & group               = *groups[layer.group];
    ggml_tensor *           parts[SPAC_N_PARTS] = {};
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        ggml_tensor * t = group.parts[part];
        if (!t) {
            continue;
        }
        const bool is_bias = part >= SPAC_PART_UP_B;
        parts[part]        = is_bias ? ggml_view_2d(p.ctx, t, t->ne[0], layer.n_expert, t->nb[1], first * t->nb[1]) : ggml_view_3d(p.ctx, t, t->ne[0], t->ne[1], layer.n_expert, t->nb[1], t->nb[2], first * t->nb[2]);
        ggml_backend_view_init(parts[part]); // with a buffer of weights: ggml's scheduler computes where they are
    }
    return spac_build_experts(p, layer, parts, p.ids, on_cpu);
}
