// The expert FFN of a MoE layer as ggml nodes, in exactly llama.cpp's order (llama-graph.cpp, build_moe_ffn).
#pragma once

#include "moe-layer.h"

struct spac_expert_ffn {
    ggml_context *         ctx;
    const spac_moe_layer * layer;
    ggml_tensor * const *  parts; // [SPAC_N_PARTS] where the experts' weights are: a slot pool, or the host
    ggml_tensor *          cur;   // [n_embd, 1 or n_expert_used, n_tokens]
    ggml_tensor *          ids;   // [n_expert_used, n_tokens] into parts; -1: skipped, the row is zero
    ggml_tensor *          up_s;  // [1, n_expert_used, n_tokens] scales of the chosen experts, or NULL
    ggml_tensor *          gate_s;
    ggml_tensor *          down_s;
};

// rows [n_embd, n_expert_used, n_tokens], not yet weighted
ggml_tensor * spac_build_expert_ffn(const spac_expert_ffn & ffn);

// scales [n_expert] of the chosen experts: [1, n_expert_used, n_tokens]; NULL if s is
ggml_tensor * spac_gather_scale(ggml_context * ctx, ggml_tensor * s, ggml_tensor * ids);
