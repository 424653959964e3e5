// Prompts on a device: a layer's experts pass through the slots. Those that are resident stay where they are; the others are
// copied while the layer before is computed, where llama.cpp copies a layer's experts first and computes it then.
#pragma once

#include "cache/device-caches.h"
#include "graph/prompt-counts.h"
#include "graph/split-graph.h"
#include "layers/layers.h"
#include "prompt-way.h"
#include "staged-loads.h"

#include "ggml-backend.h"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

struct spac_prompt_stage {
    // stage: spac_stage; devices: none: nothing is staged; all outlive it, as do graphs with its nodes
    spac_prompt_stage(spac_board & board, const spac_device_caches & cache, spac_prompt_counts & prompts, const spac_layers & layers, const spac_slot_groups & groups,
                      const std::vector<ggml_backend_dev_t> & devices, int stage);

    // one layer of a wide batch's graph; NULL: it stays llama.cpp's, and is only counted. The first layer that is asked
    // decides for the whole graph
    ggml_tensor * build(const llama_moe_hook_params & p, bool is_first);

    // a wide graph is about to be computed, which was built last; ends_narrow: its last layer is computed for few tokens, and
    // split as theirs are
    // whole: first slots [n_layer] of layers that need no staging; -1: the others
    void begin(int64_t n_tokens, bool ends_narrow, const std::vector<int32_t> & whole);

    // while the graph runs: ids [n_expert_used, n_tokens] as the router chose; slots: of the same shape
    void dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, int32_t * slots);

  private:
    struct node {
        spac_prompt_stage *    stage;
        const spac_moe_layer * layer;
    };

    static void run_node(ggml_tensor * dst, int ith, int nth, void * user_data);

    ggml_tensor * build_staged(const llama_moe_hook_params & p, node & n);

    bool can_stage() const;
    bool is_taken_over(const llama_moe_hook_params & p) const;
    void stage(const spac_moe_layer & layer);
    void stage_after(int il);

    spac_board &             board;
    const spac_device_caches cache;

    const std::vector<std::unique_ptr<spac_staged_loads>> loads; // of each cache
    spac_prompt_counts &                                  prompts;
    const spac_slot_groups &                              groups;
    const std::vector<ggml_backend_dev_t>                 devices;
    const int                                             mode; // SPAC_STAGE_NEVER where there are too few slots
    spac_prompt_way                                       way;
    std::vector<const spac_moe_layer *>                   staged; // of the graph under way, in its order

    std::map<int, node>  nodes; // by il
    std::vector<int32_t> slots_of, index_of;
};
