// The router of a MoE layer, found in the graph behind the ids that it chose: llama.cpp's hook shows only its result.
#pragma once

#include "ggml.h"

#include <cstdint>

enum spac_gating {
    SPAC_GATING_MONOTONE, // the order of the logits is that of the probabilities
    SPAC_GATING_SOFTMAX,
    SPAC_GATING_SIGMOID,
    SPAC_GATING_SQRT_SOFTPLUS,
};

struct spac_router {
    ggml_tensor * weight         = nullptr; // [n_embd, n_expert]; NULL: none was found
    ggml_tensor * bias           = nullptr; // [n_expert] of the logits, or NULL
    ggml_tensor * selection_bias = nullptr; // [n_expert] of the probabilities, or NULL
    spac_gating   gating         = SPAC_GATING_MONOTONE;

    ggml_tensor * input = nullptr; // [n_embd, n_tokens] float32, only of that graph
};

// ids: [n_expert_used, n_tokens] of a layer with n_expert experts
// Limits to groups of experts and adapters are left out: this serves predictions. No router: where ids are looked up by
// token, or in any other form that this does not know.
spac_router spac_find_router(const ggml_tensor * ids, int64_t n_expert);
