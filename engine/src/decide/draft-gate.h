// SP-MoE's predictor: while the draft model runs, what its FFNs get (in a MoE layer: its router) is put through the target's
// routers of the same layers, and what those are likely to choose is on the device when the drafts are verified. Where the two
// differ in their number of layers, layer l of the target's n is told of by layer floor(l * n_draft / n) of the draft's n_draft.
#pragma once

#include "base/home-process.h"
#include "base/job-thread.h"
#include "board/board.h"
#include "cache/device-caches.h"
#include "cutoff.h"
#include "layers/context-hook.h"
#include "routers.h"
#include "tier/memory-tier.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

// SP-MoE's own settings, for the paper's figures
struct spac_gate_limits {
    int32_t cutoff     = -1; // layers with experts that are copied for, from the first on; -1: up to the cutoff layer, as it is measured
    int32_t n_critical = 0;  // the paper's k': experts of each layer; 0: as many as its router chooses
};

struct spac_draft_gate {
    // draft: the draft model's context, of MoE or dense layers, whose graphs get one node per layer that reads, and nothing else
    // layers: that are split, of the target's n_layer; n_slots: of the device; tier: of experts on disk, or NULL
    // all outlive it, but the draft's context may go first; throws SPAC_STATUS_INVALID_ARGUMENT where the two models do not fit
    spac_draft_gate(llama_context * draft, spac_board & board, const spac_device_caches & cache, const std::vector<const spac_moe_layer *> & layers, int n_layer,
                    int n_slots, int max_batch, spac_memory_tier * tier = nullptr, const spac_gate_limits & limits = {});
    ~spac_draft_gate();

    void stop() { thread.stop(); } // nothing reads the routers any more
    void wait_idle() { thread.wait_idle(); }

  private:
    struct source {       // a layer of the draft
        int64_t width;    // of what is read; 0: a MoE layer without a router that can be read
        bool    is_dense; // else the router's input
    };
    struct node {
        spac_draft_gate *   gate;
        std::vector<size_t> indices; // of routers.layers()
    };
    struct job {
        size_t             index;
        uint64_t           forward;  // of the target, in which the token is verified
        bool               may_copy; // up to the cutoff layer
        std::vector<float> input;    // [n_embd] of the last token
    };

    static void run_node(ggml_tensor * dst, int ith, int nth, void * user_data);

    llama_moe_hook make_hook();
    void           note_layer(const llama_moe_hook_params & p);
    void           check_reads(int il, const spac_moe_layer & layer) const;
    void           add_node(const llama_moe_hook_params & p);

    void see(const node & n, const ggml_tensor * input);
    void note_time(const node & n);
    void begin_drafting(uint64_t forward);
    void work_off(const job & j);

    const spac_home_process  home;
    spac_context_hook        hook;
    const spac_device_caches cache;
    spac_memory_tier *       tier;
    spac_ahead_stats &       stats;
    spac_routers             routers;
    const int                max_batch;
    const spac_gate_limits   limits;
    std::map<int, source>    sources; // by il of the draft
    std::map<int, node>      nodes;   // of those that tell of a layer

    // of the graph's thread
    spac_draft_times    times;
    uint64_t            forward    = 0; // of the target, that is being drafted for
    uint64_t            n_forwards = 0; // of the draft model, for it
    uint64_t            begin_us   = 0; // of the first node of the forward in progress
    size_t              cutoff     = 0;
    std::vector<double> n_copies; // [n_layer] absent experts per drafting, averaged

    std::vector<std::atomic<uint32_t>> n_absent; // [n_layer] in this drafting

    spac_job_thread thread; // the first to end
};
