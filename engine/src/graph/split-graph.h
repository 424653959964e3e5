// A layer whose experts are split between device and host, as graph nodes (docs/architecture.md).
#pragma once

#include "cache/slot-pool.h"
#include "layers/moe-layer.h"

// What the nodes call while the graph runs. layer: as given to spac_build_split_*(); all tensors are in host memory.
// In-stream, a thread of CUDA's driver calls dispatch and collect: they must not call CUDA, nor wait for anything that waits for
// the stream. So no thread holds the expert cache's mutex while it calls CUDA.
struct spac_split_ops {
    // ids: [n_expert_used, n_tokens] as the router chose; ids_device: slots or -1; ids_host: experts or -1
    // both -1: an expert that is left out (weights_wanted)
    // cur: NULL in-graph; else the input of the host experts, to be handed to the executor
    // weights: the router's, [1, n_expert_used, n_tokens]; NULL unless weights_wanted
    virtual void dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * weights, const ggml_tensor * cur, int32_t * ids_device,
                          int32_t * ids_host) = 0;

    virtual bool weights_wanted() const { return false; } // when a graph is built

    // before dispatch, where choice_wanted when the graph is built: logits: [n_expert, n_tokens] of the router; chosen: [n_expert_used * n_tokens]
    virtual bool choice_wanted() const { return false; }
    virtual void choose_again(const spac_moe_layer &, const ggml_tensor * /*logits*/, const ggml_tensor * /*ids*/, int32_t * /*chosen*/) {}

    // in-graph, with the engine's own kernels: after dispatch, by one thread, with its ids_host
    virtual void plan_host(const spac_moe_layer &, const int32_t * /*ids_host*/, int64_t /*n_tokens*/, int /*n_threads*/) {}

    // device experts with the engine's own kernels, where the device is the CPU: after dispatch, by one thread; then by all
    // rows: zero where the host computes
    virtual void plan_device(const spac_moe_layer &, const spac_slot_group &, int64_t /*n_tokens*/, int /*n_threads*/) {}
    virtual void compute_device(const spac_moe_layer &, const ggml_tensor * /*cur*/, float * /*rows*/) {}

    // executor: rows [n_embd, n_expert_used, n_tokens] of the host experts
    virtual void collect(const spac_moe_layer & layer, float * rows, size_t n_rows) = 0;

    // in-graph: the device experts are done; the host experts are done
    virtual void device_done(const spac_moe_layer & layer) = 0;
    virtual void host_done(const spac_moe_layer & layer)   = 0;

    // in-graph, with the engine's own kernels: ids as given by dispatch, which comes before; called by all threads
    virtual void compute_host(const spac_moe_layer &, const ggml_tensor * /*cur*/, float * /*rows*/) {}

    virtual ~spac_split_ops() = default;
};

struct spac_split_node {
    spac_split_ops *        ops;
    const spac_moe_layer *  layer;
    const spac_slot_group * own = nullptr; // its slots, where the engine's own kernels compute the device's experts, too
};

// returns the layer's output [n_embd, n_tokens]; node must outlive the graph
ggml_tensor * spac_build_split_in_graph(const llama_moe_hook_params & p, spac_split_node * node, const spac_slot_group & group);
// the same with the engine's own kernels for the host's experts; group: NULL if all of them are the host's
ggml_tensor * spac_build_split_kernels(const llama_moe_hook_params & p, spac_split_node * node, const spac_slot_group * group);
// backend: of the nodes that call ops, the CPU's or the device's; merging: of the one that adds both sides' rows, and so of what
// follows it; NULL: as ggml's scheduler has it
ggml_tensor * spac_build_split_executor(const llama_moe_hook_params & p, spac_split_node * node, const spac_slot_group & group, ggml_backend_t backend,
                                        ggml_backend_t merging);

// llama.cpp's own nodes, on these weights, into which ids say which; on_cpu: that is where they are
ggml_tensor * spac_build_experts(const llama_moe_hook_params & p, const spac_moe_layer & layer, ggml_tensor * const * parts, ggml_tensor * ids, bool on_cpu);
