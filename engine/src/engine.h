// An engine: the hook on one context, and what it needs to split that context's MoE layers.
#pragma once

#include "board.h"
#include "default-policy.h"
#include "expert-cache.h"
#include "host/dense-matmul.h"
#include "host/ggml-worker.h"
#include "host/kernel-worker.h"
#include "moe-layer.h"
#include "prefetch-worker.h"
#include "slot-copy.h"
#include "slot-pool.h"
#include "split-graph.h"
#include "timeline.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

struct llama_context;

struct spac_engine : spac_split_ops {
    // free_with_context: NULL, or what to call when the context is freed, with the engine as its argument; an engine
    // that its context owns has no scheduler of its own process, so the built-in policy decides until one comes
    spac_engine(llama_context * ctx, const spac_engine_params & params, void (*free_with_context)(void *) = nullptr);
    ~spac_engine() override;

    spac_engine(const spac_engine &) = delete;

    spac_engine_info info() const;
    const char *     declined_reason(int il) const;

    bool apply_decision(); // takes over the board's, if it is new and whole
    void end_forward();    // no forward is running, and the device is idle

    std::unique_ptr<spac_board>        board;
    std::unique_ptr<spac_expert_cache> cache;
    spac_timeline                      timeline;

    // a server's side, between forwards
    int32_t n_draft_max(int32_t server_slot) const; // -1: no limit
    void    record_step(const llama_moe_hook_step & step);

    // the context is going away, and the model may go next: nothing of the engine's may touch the weights any more
    void forget_context();

  private:
    struct layer_state {
        spac_moe_layer  layer;
        spac_split_node node        = {};
        bool            own_kernels = false; // for its host experts
        // times of the call in progress, in microseconds
        uint64_t t_submit = 0, t_dispatch = 0, t_device = 0;
    };

    // the hook
    static ggml_tensor * build(void * user_data, const llama_moe_hook_params * params);
    ggml_tensor *        discover(const llama_moe_hook_params & p);
    ggml_tensor *        split(const llama_moe_hook_params & p);
    void                 note_graph(const llama_moe_hook_params & p);
    int32_t              n_threads_of_graph(int32_t n_tokens); // 0: as the context's

    // attaching, in this order
    void refuse_second() const;
    void discover_layers();
    void choose_device();
    void choose_kernels();
    void form_groups();
    void divide_pool();
    void find_unpinned();
    void allocate_pool();
    void probe_device();
    void start_threads();
    void start_executor();
    int  n_threads_of_host() const;
    void set_hook(bool on);
    void remove_hook();

    // spac_split_ops
    void dispatch(spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * cur, int32_t * ids_device, int32_t * ids_host) override;
    void collect(spac_moe_layer & layer, float * rows, size_t n_rows) override;
    void device_done(spac_moe_layer & layer) override;
    void host_done(spac_moe_layer & layer) override;
    void plan_host(spac_moe_layer & layer, const int32_t * ids_host, int64_t n_tokens, int n_threads) override;
    void compute_host(spac_moe_layer & layer, const ggml_tensor * cur, float * rows) override;

    void               begin_forward();
    void               close_forward();
    void               begin_layer(int il, uint64_t now);
    size_t             count_activations(const spac_moe_layer & layer, const ggml_tensor * ids);
    void               record_split(const spac_moe_layer & layer, size_t n_distinct);
    layer_state &      state_of(const spac_moe_layer & layer) { return *states[layer.il]; }
    spac_host_worker & worker_of(const spac_moe_layer & layer);
    void               take_decision();
    void               run_default_policy();
    bool               same_experts(const spac_moe_layer & layer, const llama_moe_hook_params & p) const;

    llama_context *    ctx;
    spac_engine_params params; // strings below
    std::string        device_name, cache_size, board_name;
    std::vector<int>   cpus; // that the host's own threads are pinned to; empty: anywhere
    void (*const free_with_context)(void *);

    bool                            is_active = false; // false: discovering
    std::vector<ggml_backend_dev_t> devices;           // of the context's scheduler
    ggml_backend_dev_t              device    = nullptr;
    int                             host_mode = SPAC_HOST_IN_GRAPH;
    bool                            has_slots = true;    // false: the device is "none"
    const spac_kernels *            kernels   = nullptr; // NULL: ggml's

    std::map<int, std::unique_ptr<layer_state>>   states; // MoE layers by il
    std::vector<const spac_moe_layer *>           group_like;
    std::vector<int32_t>                          group_slots;
    std::vector<std::unique_ptr<spac_slot_group>> groups;
    std::set<int>                                 logged; // layers whose later decline was said
    int32_t                                       n_layer = 0, n_expert = 0, n_expert_used = 0, n_layer_unpinned = 0;
    uint64_t                                      total_bytes = 0;

    std::unique_ptr<spac_slot_copy>      slot_copy;
    std::unique_ptr<spac_ggml_worker>    executor;     // of the layers without kernels of our own
    std::unique_ptr<spac_kernel_worker>  pool;         // of those with
    std::unique_ptr<spac_host_experts>   host_experts; // in-graph
    std::unique_ptr<spac_dense_matmul>   dense;        // where the device is "none"
    std::unique_ptr<spac_default_policy> policy;

    // the graph built last, which is the one that is computed next
    ggml_cgraph * graph          = nullptr;
    bool          is_marked      = false; // for `dense`
    int           last_built_il  = -1;
    int           n_graph_splits = 0;     // layers of it that were split
    bool          last_was_split = false; // the graph computed last: by the executor

    // the forward in progress; one thread at a time
    std::atomic<bool>     in_forward{ false }; // the worker looks too
    bool                  any_device = false, any_host = false;
    int                   last_il       = -1;
    uint64_t              last_dispatch = 0;
    std::vector<int32_t>  distinct; // experts of the layer in progress
    std::vector<uint32_t> n_rows;   // activations of each
    std::vector<int32_t>  slots;    // of each, or -1
    std::vector<int32_t>  index_of; // [n_expert] into distinct, or -1
    std::vector<int32_t>  ids_copy; // [n_expert_used * n_tokens]

    // taken over by the graph, the worker or the ABI; a copy, as another process may go on writing
    std::mutex    decision_mutex; // guards the two below
    spac_decision decision;
    uint64_t      decision_seen = 0;

    // a scheduler in another process may die or hang
    std::atomic<bool>     is_scheduled{ false }; // it decided at least once
    std::atomic<bool>     is_abandoned{ false }; // and then not for too long
    std::atomic<uint64_t> undecided_us{ 0 };     // how long forwards have gone on without a decision
    uint64_t              t_last_forward = 0;

    std::unique_ptr<spac_prefetch_worker> worker; // the last member, so the first to end: its thread uses all others
};
