// Prompts count too: what the router chose in batches that are too wide to be split is told to the scheduler, and used to
// fill free slots while the prompt is still being processed.
#pragma once

#include "activations.h"
#include "board/board.h"
#include "cache/device-caches.h"
#include "layers/layers.h"
#include "routing-log.h"

#include <cstdint>
#include <functional>
#include <map>

struct spac_prompt_counts {
    // all outlive it, as do graphs with its nodes
    spac_prompt_counts(spac_board & board, const spac_device_caches & cache, const spac_layers & layers, spac_routing_log & log, bool fills);

    // one node on the CPU that reads ids, and nothing else: the layer itself stays stock's; does nothing for other layers
    void add_node(const llama_moe_hook_params & p);

    // while the graph runs: ids [n_expert_used, n_tokens] of a layer; returns its distinct experts, valid until the next call
    const spac_activations & count(const spac_moe_layer & layer, const ggml_tensor * ids);
    void                     fill(const spac_moe_layer & layer, size_t n_tokens); // free slots, after count()

    std::function<void(int il)> on_layer; // is told how far a wide batch has come; empty: not needed

  private:
    struct node {
        spac_prompt_counts *   counts;
        const spac_moe_layer * layer;
        size_t                 n_held_max; // experts of this layer that a prompt may bring to the device, residents included
    };

    static void run_node(ggml_tensor * dst, int ith, int nth, void * user_data);

    spac_board &             board;
    const spac_device_caches cache;
    spac_routing_log &       log;
    const bool               fills;

    std::map<int, node> nodes;        // by il
    int                 last_il = -1; // of the batch in progress
    spac_activations    activations;
};
