// The routers of a model's split layers, applied on the host to inputs that were meant for other layers, or for another
// model's: which experts will be chosen?
#pragma once

#include "layers/moe-layer.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

// adds one node on the CPU to a graph that calls op with the router's input as its source; none where no router is found
void spac_add_router_node(const llama_moe_hook_params & p, ggml_backend_t backend, const char * name, ggml_custom_op_t op, void * user_data);

// n rows of a router's input, from `first` on
std::vector<float> spac_router_rows(const ggml_tensor * input, int64_t first, int64_t n);

struct spac_routers {
    // those on a device are copied to the host, once; throws SPAC_STATUS_INVALID_ARGUMENT if no layer has a router that can be
    // applied, SPAC_STATUS_OUT_OF_MEMORY
    explicit spac_routers(const std::vector<const spac_moe_layer *> & layers);

    spac_routers(const spac_routers &) = delete;

    // layers with a router, in the order of a graph
    const std::vector<const spac_moe_layer *> & layers() const { return list; }
    int64_t                                     n_embd(int il) const { return entries.at(il).weight->ne[0]; }

    // the experts that `n_expert_used` of each token would be, or the first n_most of them (0: all), chosen by most tokens first, then by rank; by one thread at a time
    // input: [n_embd, n_tokens], rows one after the other
    std::vector<int32_t> choose(int il, const float * input, int64_t n_tokens, int64_t n_most = 0);

  private:
    struct free_threadpool {
        void operator()(ggml_threadpool_t t) const { ggml_threadpool_free(t); }
    };
    struct entry {
        const ggml_tensor * weight = nullptr; // in host memory
        std::vector<float>  bias, selection_bias;
        spac_gating         gating        = SPAC_GATING_MONOTONE;
        int64_t             n_expert_used = 0;
    };

    bool                add(const spac_moe_layer & layer);
    void                compute_logits(const ggml_tensor & weight, const float * input, int64_t n_tokens);
    void                set_scores(const entry & e, const float * logits);
    const ggml_tensor * on_host(const ggml_tensor * weight);

    std::vector<const spac_moe_layer *>  list;
    std::map<int, entry>                 entries; // by il
    std::vector<ggml_context_ptr>        copies;  // of the device's, and their memory
    std::vector<ggml_backend_buffer_ptr> buffers;

    std::unique_ptr<ggml_threadpool, free_threadpool> threadpool;  // only of the caller
    std::vector<uint8_t>                              arena, work; // of a graph of one node
    std::vector<float>                                logits, scores;
    std::vector<int32_t>                              order, n_rows, chosen;
};
