// An engine: the hook on one context, and what it needs to split that context's MoE layers. It makes the parts, connects
// them, and answers for them; what each does is in a file of its own.
#pragma once

#include "base/engine-params.h"
#include "base/home-process.h"
#include "board/board.h"
#include "board/timeline.h"
#include "cache/demand-loads.h"
#include "cache/device-caches.h"
#include "cache/prefetch-worker.h"
#include "cache/slot-copy.h"
#include "cache/slot-pool.h"
#include "decide/decisions.h"
#include "decide/draft-gate.h"
#include "decide/next-layer.h"
#include "draft/head-states.h"
#include "draft/mask-drafter.h"
#include "draft/ngram-drafter.h"
#include "graph/prompt-counts.h"
#include "graph/routing-log.h"
#include "host/dense-matmul.h"
#include "host/team-watch.h"
#include "layers/context-hook.h"
#include "layers/layers.h"
#include "plan/host-work.h"
#include "plan/plan.h"
#include "split/exact-sample.h"
#include "split/forward.h"
#include "split/graph-splitter.h"
#include "split/wide-batches.h"
#include "tier/expert-copy.h"
#include "tier/memory-tier.h"
#include "untried/untried.h"

#include <memory>
#include <mutex>
#include <vector>

struct spac_engine {
    // attaches; free_with_context: NULL, or what to call when the context is freed, with the engine as its argument; an
    // engine that its context owns has no scheduler of its own process, so the built-in policy decides until one comes;
    // masks, ngram: NULL, or what drafts for a server that drives the context
    // max_kl: what settings.lossy may cost a server's tokens in the mean (spac_exact_sample); 0: no limit
    spac_engine(llama_context * ctx, const spac_engine_params & params, void (*free_with_context)(void *) = nullptr,
                std::unique_ptr<spac_mask_drafter> masks = nullptr, std::unique_ptr<spac_ngram_drafter> ngram = nullptr, double max_kl = 0);
    ~spac_engine();

    spac_engine(const spac_engine &) = delete;

    // this process was forked from the one that attached it, and has none of its threads; an engine without any works there, too
    bool is_away() const { return (plan.has_slots || tier) && !home.is_this(); }

    // one that is away stays as it is
    static void free(spac_engine * engine);

    spac_engine_info info() const;
    void             show_info() const;

    // from now on the draft model's graphs say what this one's routers will choose; throws as spac_draft_gate does
    void watch_draft(llama_context * draft, const spac_gate_limits & limits = {});

    // waits for the graph in progress where a device may still call the engine
    void wait_for_stream();
    void end_forward(); // of which nothing is in progress then

    // of the next forwards' tokens the first n_tokens are learned from; 0: all
    void count_first(int32_t n_tokens);

    // what is kept of a server slot's sequence; see llama_moe_hook
    void forget(int32_t server_slot, bool is_replaced);

    // the context is going away, and the model may go next: nothing of the engine's may touch the weights any more
    void forget_context();

    // The parts, in the order in which they are made. Each knows only of those above it.
    const spac_home_process                   home;
    const spac_settings                       settings;
    const std::unique_ptr<spac_mask_drafter>  masks;
    const std::unique_ptr<spac_ngram_drafter> ngram;
    spac_context_hook                         hook;
    spac_layers                               layers;
    const spac_plan                           plan;
    const spac_slot_groups                    slots;
    const std::unique_ptr<spac_board>         board;
    spac_timeline                             timeline;
    std::mutex                                cache_mutex;
    // of each device
    const std::vector<std::unique_ptr<spac_expert_cache>> cache_of;
    const spac_device_caches                              cache;
    const std::vector<std::unique_ptr<spac_demand_loads>> demand; // if a policy to compare with was asked for
    const std::unique_ptr<spac_memory_tier>               tier;   // if memory holds only a part of the experts
    spac_lossy                                            lossy;
    const std::vector<std::unique_ptr<spac_expert_copy>>  copies; // in fewer bits, if what is lossy may compute them
    spac_decisions                                        decisions;
    spac_host_work                                        host;
    const std::unique_ptr<spac_dense_matmul>              dense; // where the device is "none"
    std::unique_ptr<spac_team_watch>                      team;  // the same
    spac_routing_log                                      log;
    spac_forward                                          forward;
    const std::unique_ptr<spac_exact_sample>              samples; // where what is lossy has a limit
    spac_prompt_counts                                    prompts;
    spac_untried                                          untried;
    spac_wide_batches                                     wide;
    const std::unique_ptr<spac_next_layer>                next_layer; // where a predictor of the engine's own was asked for
    spac_graph_splitter                                   splitter;
    std::unique_ptr<spac_draft_gate>                      draft_gate; // of watch_draft()
    spac_head_states                                      head_states;
    // of each device, unless that is "none"
    std::vector<std::unique_ptr<spac_slot_copy>>       slot_copies;
    std::vector<std::unique_ptr<spac_prefetch_worker>> workers; // the first to end: their threads use the others

  private:
    llama_moe_hook                                  make_hook(void (*free_with_context)(void *));
    ggml_tensor *                                   build(const llama_moe_hook_params & p);
    bool                                            can_reuse() const;
    int32_t                                         before_graph(ggml_cgraph * graph, int32_t n_tokens); // threads for it; 0: the context's, -1: none
    int32_t                                         n_threads_beside_others(int32_t n_tokens);
    std::vector<std::unique_ptr<spac_expert_cache>> make_caches();
    std::vector<std::unique_ptr<spac_demand_loads>> make_demand() const;
    bool                                            is_scheduled() const; // whether decisions move anything
    double                                          copy_gb_s(size_t device) const;
    void                                            share_board();
    void                                            start_workers();
    void                                            look_ahead(const llama_token * tokens, int32_t n_tokens);
    void                                            record_step(const llama_moe_hook_step & step);
    void                                            name_sequences(const llama_ubatch & ubatch);
    std::unique_ptr<spac_exact_sample>              make_samples(double max_kl);
    void                                            show_divergence();
    bool                                            copy_to_slot(const spac_load & load);
    void                                            look_around(size_t device);
    void                                            log_attached() const;

    std::mutex tier_mutex; // for one copy at a time from the memory tier
};
