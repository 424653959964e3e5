#include "moe-layer.h"

#include "base/status.h"
#include "llama-graph.h" // llm_ffn_op_type

// 3-d for weights, 2-d for biases: the stride of one expert
static size_t expert_stride(const spac_moe_layer & layer, int part) {
    const ggml_tensor * t = layer.parts[part];
    return part >= SPAC_PART_UP_B ? t->nb[1] : t->nb[2];
}

size_t spac_moe_layer::part_bytes(int part) const {
    return parts[part] ? expert_stride(*this, part) : 0;
}

size_t spac_moe_layer::expert_bytes() const {
    size_t sum = 0;
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        sum += part_bytes(part);
    }
    return sum;
}

const char * spac_moe_layer::part_data(int part, int ie) const {
    return (const char *) parts[part]->data + ie * expert_stride(*this, part);
}

spac_expert_parts spac_moe_layer::parts_of(int ie) const {
    spac_expert_parts found = {};
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        found[part] = parts[part] ? part_data(part, ie) : nullptr;
    }
    return found;
}

std::string spac_moe_layer::layout_key() const {
    std::string key;
    for (const ggml_tensor * t : parts) {
        key += t ? spac_format("%d:%lld:%lld ", t->type, (long long) t->ne[0], (long long) t->ne[1]) : "- ";
    }
    return key;
}

static bool op_is_handled(const llama_moe_hook_params & p) {
    const bool has_gate = p.gate || p.gate_up;
    switch (p.op) {
        case LLM_FFN_SILU:
        case LLM_FFN_GELU:
        case LLM_FFN_RELU:
            return true;
        case LLM_FFN_SWIGLU_OAI_MOE:
            return has_gate;
        case LLM_FFN_RELU_SQR:
            return !has_gate;
        default:
            return false;
    }
}

static std::string reason_to_decline(const llama_moe_hook_params & p, const spac_moe_layer & layer, const std::string & arch) {
    if (p.has_callback) {
        return SPAC_DECLINED_CALLBACK;
    }
    if (p.has_lora) {
        return SPAC_DECLINED_BY_LORA;
    }
    if (p.has_prec) {
        return "the model sets the precision of single matmuls";
    }
    if (layer.clamp > 0 && arch == "dflash") {
        return "clamped SwiGLU of a dflash model"; // one of two forms, by a parameter that the hook does not see
    }
    if (!op_is_handled(p)) {
        return spac_format("activation %d", p.op);
    }
    if (!layer.parts[SPAC_PART_DOWN] || (!layer.parts[SPAC_PART_UP] && !layer.parts[SPAC_PART_GATE_UP])) {
        return "no up or down experts";
    }
    for (const ggml_tensor * t : layer.parts) {
        if (t && (!t->buffer || !t->data)) {
            return spac_format("%s has no memory", t->name);
        }
        if (t && !ggml_backend_buffer_is_host(t->buffer)) {
            return spac_format("experts are in a %s buffer, not in plain host memory (keep them on the CPU, without repacking)",
                               ggml_backend_buft_name(ggml_backend_buffer_get_type(t->buffer)));
        }
    }
    return "";
}

// as build_moe_ffn does, which looks at the limit only where gate and up are separate
static void set_clamp(spac_moe_layer & layer, const llama_moe_hook_params & p, const std::string & arch) {
    if (p.op != LLM_FFN_SILU || !p.gate || p.gate_up || p.clamp <= 1e-6f) {
        return;
    }
    layer.clamp            = p.clamp;
    layer.clamps_in_one_op = arch == "maple" || arch == "deepseek4" || arch == "glm5-next" || arch == "hy_v4";
}

spac_moe_layer spac_moe_layer_from_hook(const llama_moe_hook_params & p, const std::string & arch) {
    spac_moe_layer layer;
    layer.il            = p.il;
    layer.n_embd        = p.cur->ne[0];
    layer.n_expert      = p.down ? p.down->ne[2] : 0;
    layer.n_expert_used = p.n_expert_used_sum;

    layer.parts[SPAC_PART_UP]        = p.gate_up ? nullptr : p.up;
    layer.parts[SPAC_PART_GATE]      = p.gate_up ? nullptr : p.gate;
    layer.parts[SPAC_PART_DOWN]      = p.down;
    layer.parts[SPAC_PART_GATE_UP]   = p.gate_up;
    layer.parts[SPAC_PART_UP_B]      = p.gate_up ? nullptr : p.up_b;
    layer.parts[SPAC_PART_GATE_B]    = p.gate_up ? nullptr : p.gate_b;
    layer.parts[SPAC_PART_DOWN_B]    = p.down_b;
    layer.parts[SPAC_PART_GATE_UP_B] = p.gate_up ? p.gate_up_b : nullptr;

    layer.up_s   = p.up_s;
    layer.gate_s = p.gate_up ? nullptr : p.gate_s;
    layer.down_s = p.down_s;

    layer.router       = spac_find_router(p.ids, layer.n_expert);
    layer.router.input = nullptr;

    layer.op                = p.op;
    layer.weight_before_ffn = p.weight_before_ffn;
    set_clamp(layer, p, arch);
    layer.declined = reason_to_decline(p, layer, arch);
    return layer;
}
