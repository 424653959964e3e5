// An engine: the hook on one context, and what it needs to split that context's MoE layers. It owns the parts, connects
// them, and answers for them; each part is in a file of its own.
#pragma once

#include "board.h"
#include "decisions.h"
#include "engine-params.h"
#include "expert-cache.h"
#include "forward.h"
#include "graph-splitter.h"
#include "host-work.h"
#include "host/dense-matmul.h"
#include "layers.h"
#include "plan.h"
#include "prompt-counts.h"
#include "prefetch-worker.h"
#include "slot-copy.h"
#include "slot-pool.h"
#include "timeline.h"

#include <memory>
#include <vector>

struct llama_context;

struct spac_engine {
    // free_with_context: NULL, or what to call when the context is freed, with the engine as its argument; an engine
    // that its context owns has no scheduler of its own process, so the built-in policy decides until one comes
    spac_engine(llama_context * ctx, const spac_engine_params & params, void (*free_with_context)(void *) = nullptr);
    ~spac_engine();

    spac_engine(const spac_engine &) = delete;

    spac_engine_info info() const;
    const char *     declined_reason(int il) const { return layers.declined_reason(il); }

    void apply_decision() { decisions->take_over(); }
    void end_forward() { forward->end(); } // no forward is running, and the device is idle

    std::unique_ptr<spac_board>        board;
    std::unique_ptr<spac_expert_cache> cache;
    spac_timeline                      timeline;

    // the context is going away, and the model may go next: nothing of the engine's may touch the weights any more
    void forget_context();

  private:
    // the hook
    static ggml_tensor * build(void * user_data, const llama_moe_hook_params * params);
    void                 discover(const llama_moe_hook_params & p);
    int32_t              n_draft_max(int32_t server_slot) const; // -1: no limit
    void                 record_step(const llama_moe_hook_step & step);
    void                 set_hook(bool on);
    void                 remove_hook();

    // attaching, in this order
    void refuse_second() const;
    void discover_layers();
    void make_board();
    void make_cache();
    void make_decisions();
    void make_dense();
    void go_to_work();
    void start_worker();
    void log_attached() const;

    bool copy_to_slot(const spac_load & load);
    void look_around();

    llama_context * ctx;
    void (*const free_with_context)(void *);
    const spac_settings settings;

    std::vector<ggml_backend_dev_t> devices; // of the context's scheduler
    spac_layers                     layers;
    spac_plan                       plan;
    spac_slot_groups                groups;

    std::unique_ptr<spac_decisions>      decisions;
    std::unique_ptr<spac_host_work>      host;
    std::unique_ptr<spac_dense_matmul>   dense; // where the device is "none"
    std::unique_ptr<spac_forward>        forward;
    std::unique_ptr<spac_prompt_counts>  prompts; // NULL where the device is "none"
    std::unique_ptr<spac_graph_splitter> splitter; // NULL while attaching: the hook discovers

    std::unique_ptr<spac_slot_copy>       slot_copy;
    std::unique_ptr<spac_prefetch_worker> worker; // the last member, so the first to end: its thread uses all others
};
