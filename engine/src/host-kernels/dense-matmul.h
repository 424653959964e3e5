// Weights that are no experts (attention, shared experts, output), multiplied by the engine's kernels where the host
// computes all of a model.
#pragma once

#include "kernels.h"

#include <vector>

// While it lives, ggml's CPU backend multiplies the quantised matrices among a model's tensors so, in every context of the
// model. Those that llama.cpp has repacked stay its own, as do F16 and BF16, where its kernels are as fast.
struct spac_dense_matmul {
    spac_dense_matmul(const std::vector<ggml_tensor *> & tensors, const spac_kernels & kernels);
    ~spac_dense_matmul();

    spac_dense_matmul(const spac_dense_matmul &) = delete;

    size_t n_weights() const { return weights.size(); }

  private:
    std::vector<ggml_tensor *> weights;
};
