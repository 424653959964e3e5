// The MoE layers of a model, by their index: what the hook showed while the context reserved its graphs.
#pragma once

#include "moe-layer.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct spac_layers {
    // one layer of a graph; a second set of experts under the same index declines it
    void see(const llama_moe_hook_params & p, const std::string & arch);

    // all were seen: throws if there is nothing to split, and logs what stays as it is
    void check(int32_t n_layer_of_model);

    // puts split layers of equal types and shapes into one layout group
    void form_groups();

    std::vector<spac_moe_layer *>       split();
    std::vector<const spac_moe_layer *> split() const;

    const char * declined_reason(int il) const; // NULL: split, or not MoE

    std::map<int, spac_moe_layer> by_il; // nodes of graphs point into it

    int32_t n_layer = 0, n_expert = 0, n_expert_used = 0; // of the model; of any layer, the largest

    std::vector<const spac_moe_layer *> group_like;      // any layer of each group
    uint64_t                            total_bytes = 0; // of all experts of the split layers
};

// a layer is known by its experts: a graph may hold others under the same index
inline bool spac_same_experts(const spac_moe_layer & layer, const llama_moe_hook_params & p) {
    return layer.parts[SPAC_PART_DOWN] == p.down;
}
