// What the hook does with the graphs of a context while its engine is at work: which layers are split, and how.
#pragma once

#include "cache/slot-pool.h"
#include "decide/next-layer.h"
#include "graph/prompt-counts.h"
#include "graph/routing-log.h"
#include "graph/split-graph.h"
#include "host/dense-matmul.h"
#include "layers/layers.h"
#include "plan/host-work.h"
#include "plan/plan.h"
#include "spac.h"
#include "untried/untried.h"
#include "wide-batches.h"

#include <cstdint>
#include <map>
#include <set>
#include <vector>

struct spac_graph_splitter {
    // all outlive the splitter, and graphs that it built point into it; dense: NULL unless the device is "none"
    // next_layer: NULL unless it was asked for
    spac_graph_splitter(const spac_plan & plan, const spac_layers & layers, const spac_slot_groups & groups, const spac_host_work & host,
                        const spac_dense_matmul * dense, spac_split_ops & ops, spac_prompt_counts & prompts, spac_untried & untried,
                        spac_routing_log & log, spac_next_layer * next_layer, spac_wide_batches & wide, spac_reason * declined,
                        int max_batch);

    ggml_tensor * build(const llama_moe_hook_params & p); // NULL: the layer stays as it is
    bool          can_reuse() const;                      // whether the last graph's whole layers are still the ones, and the log is read as it was then
    // a graph is about to be computed, which was built last; true: all of its layers are whole and call nothing
    bool    enter(int32_t n_tokens);
    void    wait_for_devices() const;                              // that they have done all graphs before
    int     n_as_chosen() const { return (int) as_chosen.size(); } // layers that should choose again, and whose routers do not let them
    int32_t n_threads_of(ggml_cgraph * graph, int32_t n_tokens);   // which is about to be computed, and was built last; 0: as the context's

  private:
    void           note_graph(const llama_moe_hook_params & p);
    ggml_tensor *  split(llama_moe_hook_params p);
    ggml_tensor *  build_wide(const llama_moe_hook_params & p);
    ggml_tensor *  build_whole(const llama_moe_hook_params & p);
    ggml_backend_t backend_of_device(const llama_moe_hook_params & p) const; // which has the layer's slots; NULL: not in this context
    // where the nodes are that call the engine
    ggml_backend_t backend_of_calls(const llama_moe_hook_params & p) const;
    bool           can_split(const llama_moe_hook_params & p);
    bool           is_too_wide(const llama_moe_hook_params & p) const;
    bool           is_split_by_executor(int32_t n_tokens) const;
    bool           wants_log() const;

    const spac_plan &               plan;
    const spac_slot_groups &        groups;
    const spac_host_work &          host;
    const spac_dense_matmul * const dense;
    spac_prompt_counts &            prompts;
    spac_untried &                  untried;
    spac_routing_log &              log;
    spac_next_layer * const         next_layer;
    spac_wide_batches &             wide;
    const bool                      can_log;  // something is placed, by which token used which experts
    spac_reason * const             declined; // of the board, by il
    const int                       max_batch;

    std::map<int, spac_split_node> nodes;     // of the split layers by il
    std::set<int>                  as_chosen; // layers

    // the graph built last, which is the one that is computed next
    struct {
        ggml_backend_sched_t sched     = nullptr;
        ggml_cgraph *        graph     = nullptr;
        bool                 wants_log = false; // somebody read the routing log when it was begun
        bool                 is_logged = false; // a layer of it was seen whose ids are
        int                  last_il   = -1;
        int                  n_split   = 0;     // layers of it
        bool                 is_wide   = false; // one of them is
    } built;

    bool last_was_split = false; // the graph computed last: by the executor
};
