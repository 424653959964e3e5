// Weights that are no experts (attention, shared experts, output), multiplied by the engine's kernels where the host computes
// all of a model; and the attention of its wide batches (attention.h), which is marked with them.
#pragma once

#include "ggml.h"
#include "kernels.h"

#include <cstdint>
#include <unordered_set>
#include <vector>

// Quantised matrices among a model's tensors, and those of BF16 for wide batches where there are tiles. Those that llama.cpp
// has repacked stay its own, as does F16, where its kernels are as fast. The choice is made graph by graph, and the mark is on
// a graph's node, never on a weight: other contexts of the same model may be computing.
struct spac_dense_matmul {
    // kernels: of spac_kernels_here(); NULL: all matrices stay ggml's
    spac_dense_matmul(const std::vector<ggml_tensor *> & tensors, const spac_kernels * kernels);

    // ggml's CPU backend will multiply this graph's nodes so; called before it is computed, by the thread that does
    void mark(ggml_cgraph * graph) const;

    // when the calling thread's last graph came to the last of its marked nodes, for most models the output: 0: never
    static uint64_t t_graph_end();

    size_t n_weights() const { return weights.size(); }

  private:
    std::unordered_set<const ggml_tensor *> weights;

    void * own_mark = nullptr;
};
