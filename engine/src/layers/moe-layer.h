// A Mixture-of-Experts layer as the hook saw it, and the layout group it belongs to.
#pragma once

#include "router.h"

#include "llama-moe-hook.h"

#include <array>
#include <cstdint>
#include <string>

// the tensors that together hold the experts of a layer; the last dimension counts experts
enum spac_part {
    SPAC_PART_UP,
    SPAC_PART_GATE,
    SPAC_PART_DOWN,
    SPAC_PART_GATE_UP,
    SPAC_PART_UP_B,
    SPAC_PART_GATE_B,
    SPAC_PART_DOWN_B,
    SPAC_PART_GATE_UP_B,
    SPAC_N_PARTS,
};

typedef std::array<const char *, SPAC_N_PARTS> spac_expert_parts; // where an expert's bytes are; NULL where the model has none

struct spac_moe_layer {
    int     il            = -1;
    int64_t n_embd        = 0;
    int64_t n_expert      = 0;
    int64_t n_expert_used = 0;

    ggml_tensor * parts[SPAC_N_PARTS] = {};      // in host memory; NULL where the model has none
    ggml_tensor * up_s                = nullptr; // scales per expert, applied through the original ids
    ggml_tensor * gate_s              = nullptr;
    ggml_tensor * down_s              = nullptr;

    spac_router router; // without input: that is a graph's

    int   op                = 0;     // llm_ffn_op_type
    float clamp             = 0;     // of SwiGLU; 0: none
    bool  clamps_in_one_op  = false; // ggml_swiglu_clamp, instead of two clamps around SiLU
    bool  weight_before_ffn = false;

    // set by attaching
    std::string declined;            // reason; empty: split
    int         device      = 0;     // of the plan's, whose slots its experts have
    int         group       = -1;    // layers of one group share slots
    bool        own_kernels = false; // the engine's, not ggml's, compute its host experts

    const spac_moe_layer * copy = nullptr; // the same in fewer bits, for what may be lossy, and so on; NULL: no more

    bool is_split() const { return declined.empty(); }

    size_t            part_bytes(int part) const; // of one expert
    size_t            expert_bytes() const;       // all parts of one expert
    const char *      part_data(int part, int ie) const;
    spac_expert_parts parts_of(int ie) const; // in the tensors

    const spac_moe_layer & nth_copy(int n) const { return n == 0 ? *this : copy->nth_copy(n - 1); }

    // layers of one device with equal keys share slots
    std::string layout_key() const;
};

// of a layer, as long as the adapter is set
inline constexpr char SPAC_DECLINED_BY_LORA[] = "a LoRA adapter touches the experts";

// why all layers of a context with an eval callback are declined
inline constexpr char SPAC_DECLINED_CALLBACK[] = "the program watches every node of the graph (cb_eval), which has to be the stock one";

// reads a layer from the hook's arguments; sets declined where the engine cannot handle it
// arch: general.architecture of the model
spac_moe_layer spac_moe_layer_from_hook(const llama_moe_hook_params & params, const std::string & arch);
