// What the routers of one context choose, recorded while any llama.cpp program computes stock graphs (PYSPAC_TRACE): each
// layer's nodes are copied to a file once they are computed, and pyspac/lab/raw_trace.py reads it. Nothing is computed here.
#pragma once

#include "draft/mask-drafter.h"
#include "trace-file.h"

#include "ggml-backend.h"
#include "llama-moe-hook.h"

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

// what is recorded beside the chosen experts and their weights
struct spac_trace_wants {
    bool logits       = false; // the router's scores of all experts
    bool inputs       = false; // what the routers get, and the routers
    bool draft_inputs = false; // of all contexts but the first: only what their routers get, or their dense FFNs; of the first: the routers

    // of text such as "logits,inputs"; throws SPAC_STATUS_INVALID_ARGUMENT
    static spac_trace_wants read(const std::string & text);
};

struct spac_routing_trace {
    // sets the context's hook, which owns what is made here; masks: NULL, or what drafts for a server that drives the context
    // throws SPAC_STATUS_INVALID_ARGUMENT
    static void attach(llama_context * ctx, const std::string & path, const spac_trace_wants & wants, std::unique_ptr<spac_mask_drafter> masks);

  private:
    spac_routing_trace(std::shared_ptr<spac_trace_file> file, const spac_trace_wants & wants, std::unique_ptr<spac_mask_drafter> masks);

    llama_moe_hook make_hook();
    void           see_layer(const llama_moe_hook_params & p);
    int32_t        begin(ggml_cgraph * graph, const llama_ubatch * ubatch);
    bool           is_wanted(const ggml_tensor * node, std::string & what, int32_t & il) const;
    void           note(const ggml_tensor * node, const std::string & what, int32_t il);
    void           note_router(const ggml_tensor * logits, int32_t il);
    void           write(const ggml_tensor * tensor, const char * what, int32_t il);
    void           write_once(const ggml_tensor * tensor, const char * what, int32_t il);
    static bool    on_node(ggml_tensor * node, bool asks, void * user_data);

    const std::shared_ptr<spac_trace_file>    file;
    const uint32_t                            context;
    const bool                                records_choices, records_logits, records_inputs, records_routers;
    const std::unique_ptr<spac_mask_drafter>  masks;
    std::set<std::pair<std::string, int32_t>> written;        // of write_once()
    std::set<int32_t>                         routed;         // MoE layers
    std::map<const ggml_tensor *, int32_t>    dense_inputs;   // of the graph built last: its layer
    const ggml_tensor *                       last = nullptr; // node of the graph in progress
    std::vector<int32_t>                      forward;        // of the graph in progress, until its first node was written
    std::vector<uint8_t>                      bytes;
};
