// What no GPU has computed yet, behind one door: layers that are whole on the device (whole-loads.h), and prompts whose experts
// pass through its slots (prompt-stage.h), where that is the faster way (prompt-way.h). The rest of the engine works without.
#pragma once

#include "cache/device-caches.h"
#include "prompt-stage.h"
#include "whole-loads.h"

#include <cstdint>
#include <memory>
#include <vector>

struct spac_untried {
    // devices: that prompts may pass through the slots of; none: no prompt does; stage: spac_stage
    // all outlive it, as do graphs with its nodes
    spac_untried(spac_board & board, const spac_device_caches & cache, spac_prompt_counts & prompts, const spac_layers & layers, const spac_slot_groups & groups,
                 const std::vector<ggml_backend_dev_t> & devices, int stage);

    // layers [n_layer] that the scheduler wants whole from now on
    void want_whole(const uint8_t * wanted) const;

    // building a graph, from its first layer to its last

    void          begin_graph();
    ggml_tensor * build_whole(const llama_moe_hook_params & p, const spac_moe_layer & layer, bool on_cpu); // NULL: it is not whole
    ggml_tensor * build_prompt(const llama_moe_hook_params & p, bool is_first) { return stage.build(p, is_first); }
    bool          can_reuse() const; // whether the last graph's whole layers are still the ones

    // the graph that was built last is about to be computed

    int  n_whole() const { return n_built; } // layers of it
    void enter_graph(bool is_wide) const;
    void begin_prompt(int64_t n_tokens, bool ends_narrow) { stage.begin(n_tokens, ends_narrow, built); }

  private:
    uint64_t version() const;

    const spac_slot_groups &                             groups;
    const std::vector<std::unique_ptr<spac_whole_loads>> whole; // of each cache
    spac_prompt_stage                                    stage;

    // of the graph built last, as of the caches when it was begun
    std::vector<int32_t> built; // [n_layer] first slot, in the pool of each layer's device; -1: split
    uint64_t             built_version = 0;
    int                  n_built       = 0;
};
