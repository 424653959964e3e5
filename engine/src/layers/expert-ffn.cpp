#include "expert-ffn.h"

#include "llama-graph.h" // llm_ffn_op_type

#include <cmath>

ggml_tensor * spac_gather_scale(ggml_context * ctx, ggml_tensor * s, ggml_tensor * ids) {
    if (!s) {
        return nullptr;
    }
    const int64_t n_expert = s->ne[0];
    s                      = ggml_reshape_3d(ctx, s, 1, n_expert, 1);
    s                      = ggml_repeat_4d(ctx, s, 1, n_expert, ids->ne[1], 1);
    return ggml_get_rows(ctx, s, ids);
}

// w x, scaled, plus bias
static ggml_tensor * project(const spac_expert_ffn & ffn, spac_part w, spac_part b, ggml_tensor * x, ggml_tensor * s) {
    ggml_tensor * y = ggml_mul_mat_id(ffn.ctx, ffn.parts[w], x, ffn.ids);
    if (s) {
        y = ggml_mul(ffn.ctx, y, s);
    }
    if (ffn.parts[b]) {
        y = ggml_add_id(ffn.ctx, y, ffn.parts[b], ffn.ids);
    }
    return y;
}

static ggml_tensor * half_of(ggml_context * ctx, ggml_tensor * t, int half) {
    const int64_t n = t->ne[0] / 2;
    return ggml_view_3d(ctx, t, n, t->ne[1], t->ne[2], t->nb[1], t->nb[2], half * n * t->nb[0]);
}

static ggml_tensor * swiglu(ggml_context * ctx, const spac_moe_layer & layer, ggml_tensor * gate, ggml_tensor * up) {
    if (layer.clamp == 0) {
        return ggml_swiglu_split(ctx, gate, up);
    }
    if (layer.clamps_in_one_op) {
        return ggml_swiglu_clamp(ctx, gate, up, layer.clamp);
    }
    up   = ggml_clamp(ctx, up, -layer.clamp, layer.clamp);
    gate = ggml_clamp(ctx, ggml_silu(ctx, gate), -INFINITY, layer.clamp);
    return ggml_mul(ctx, gate, up);
}

static ggml_tensor * activate(ggml_context * ctx, const spac_moe_layer & layer, ggml_tensor * gate, ggml_tensor * up) {
    switch (layer.op) {
        case LLM_FFN_SILU:
            return gate ? swiglu(ctx, layer, gate, up) : ggml_silu(ctx, up);
        case LLM_FFN_GELU:
            return gate ? ggml_geglu_split(ctx, gate, up) : ggml_gelu(ctx, up);
        case LLM_FFN_RELU:
            return gate ? ggml_reglu_split(ctx, gate, up) : ggml_relu(ctx, up);
        case LLM_FFN_RELU_SQR:
            return ggml_sqr(ctx, ggml_relu(ctx, up));
        case LLM_FFN_SWIGLU_OAI_MOE:
            return ggml_swiglu_oai(ctx, gate, up, 1.702f, 7.0f);
        default:
            GGML_ABORT("activation %d was not declined", layer.op);
    }
}

ggml_tensor * spac_build_expert_ffn(const spac_expert_ffn & ffn) {
    ggml_tensor * up   = nullptr;
    ggml_tensor * gate = nullptr;

    if (ffn.parts[SPAC_PART_GATE_UP]) {
        ggml_tensor * gate_up = project(ffn, SPAC_PART_GATE_UP, SPAC_PART_GATE_UP_B, ffn.cur, ffn.up_s);
        gate                  = half_of(ffn.ctx, gate_up, 0);
        up                    = half_of(ffn.ctx, gate_up, 1);
    } else {
        up = project(ffn, SPAC_PART_UP, SPAC_PART_UP_B, ffn.cur, ffn.up_s);
        if (ffn.parts[SPAC_PART_GATE]) {
            gate = project(ffn, SPAC_PART_GATE, SPAC_PART_GATE_B, ffn.cur, ffn.gate_s);
        }
    }
    return project(ffn, SPAC_PART_DOWN, SPAC_PART_DOWN_B, activate(ffn.ctx, *ffn.layer, gate, up), ffn.down_s);
}
