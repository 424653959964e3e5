// Batches wider than max_batch where experts stay on disk beside a device: llama.cpp would compute them from the mapped file,
// one page fault after the other. So the host computes all of their experts, read through the memory tier. They are counted
// as prompts are (prompt-counts.h); the device's experts stay where they are, and wait.
#pragma once

#include "board/board.h"
#include "graph/split-graph.h"
#include "layers/layers.h"
#include "plan/host-work.h"

#include <cstdint>
#include <map>

struct spac_wide_batches : spac_split_ops {
    // tier: NULL: none, and nothing is built; all outlive it, and graphs with its nodes point into it
    spac_wide_batches(spac_board & board, const spac_layers & layers, spac_host_work & host, const spac_memory_tier * tier);

    bool          has_tier() const { return tier != nullptr; }
    ggml_tensor * build(const llama_moe_hook_params & p); // NULL: the layer stays as it is

    // spac_split_ops
    void dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * weights, const ggml_tensor * cur, int32_t * ids_device, int32_t * ids_host) override;
    void plan_host(const spac_moe_layer & layer, const int32_t * ids_host, int64_t n_tokens, int n_threads) override;
    void compute_host(const spac_moe_layer & layer, const ggml_tensor * cur, float * rows) override;
    void host_done(const spac_moe_layer & layer) override;
    void collect(const spac_moe_layer &, float *, size_t) override {}
    void device_done(const spac_moe_layer &) override {}

  private:
    spac_board &                   board;
    spac_host_work &               host;
    const spac_memory_tier * const tier;
    std::map<int, spac_split_node> nodes; // by il
};
