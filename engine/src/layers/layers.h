// The MoE layers of a model, by their index: what its context's hook shows while the context reserves its graphs.
#pragma once

#include "context-hook.h"
#include "moe-layer.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct spac_layers {
    // sees all layers, and logs which stay as they are; throws if there are some, and none can be split
    // the hook is this object's until another one is set
    explicit spac_layers(spac_context_hook & hook);

    spac_layers(const spac_layers &) = delete;

    void check(bool must_split) const; // throws where no layer can be split; says which stay as they are

    // gives each layer the one of these devices that llama.cpp gave it, or the first one; which of them have one that is split
    std::vector<bool> assign(const std::vector<ggml_backend_dev_t> & to);

    // puts split layers of equal types and shapes, and one device, into one layout group; or each into one of its own
    void form_groups(bool per_layer);

    std::vector<const spac_moe_layer *> split() const; // in the order of a graph
    bool                                any_split() const;

    const char * declined_reason(int il) const; // NULL: split, or not MoE

    std::map<int, spac_moe_layer>   by_il;      // nodes of graphs point into it
    std::vector<ggml_backend_dev_t> devices;    // of the context's scheduler; none of a dense model
    bool                            is_on_host; // all of the model's weights

    int32_t n_layer = 0, n_expert = 0, n_expert_used = 0; // of the model; of any layer, the largest

    std::vector<const spac_moe_layer *> group_like;      // any layer of each group
    uint64_t                            total_bytes = 0; // of all experts of the split layers

  private:
    void see(const llama_moe_hook_params & p);
    void add(const spac_moe_layer & layer);

    const llama_model * const model;
    const std::string         arch; // general.architecture of the model
};

// a layer is known by its experts: a graph may hold others under the same index
inline bool spac_same_experts(const spac_moe_layer & layer, const llama_moe_hook_params & p) {
    return layer.parts[SPAC_PART_DOWN] == p.down;
}
