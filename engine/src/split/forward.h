// The forward in progress: what the nodes of split layers call while the graph runs, compute_host() from all of its
// threads, the rest from one at a time.
#pragma once

#include "board/board.h"
#include "board/timeline.h"
#include "cache-routing.h"
#include "cache/demand-loads.h"
#include "cache/device-caches.h"
#include "decide/decisions.h"
#include "device-clock.h"
#include "graph/activations.h"
#include "graph/routing-log.h"
#include "graph/split-graph.h"
#include "lossy.h"
#include "plan/host-work.h"

#include <atomic>
#include <cstdint>
#include <vector>

struct spac_forward : spac_split_ops {
    // fills: whether experts that were just used take free slots
    // tier: of experts on disk, or NULL
    // lossy: what may be left out; nothing unless it was asked for
    // cache: empty without slots and without experts on disk
    // demand: of each device, what brings experts that a layer does not find; empty: nothing does, and the host computes them
    // il_to_publish: the layer with which a forward ends, and the board is published; -1: a worker does that between forwards
    spac_forward(spac_board & board, const spac_device_caches & cache, spac_decisions & decisions, spac_host_work & host,
                 spac_memory_tier * tier, spac_timeline & timeline, spac_routing_log & log, spac_lossy & lossy, std::vector<spac_demand_loads *> demand, bool fills, int il_to_publish,
                 const spac_device_clock & clock);

    bool is_running() const { return in_progress; } // the worker asks too
    void begin();                                   // by itself where a layer is split
    void end();                                     // no forward is running, and the device is idle

    // of the next graph's tokens, and of those whose outputs are wanted, which the last layer has alone: whose they are
    void name_sequences(std::vector<int32_t> of_tokens, std::vector<int32_t> of_outputs);

    void   begin_request(int32_t sequence, bool is_exact) { lossy.begin_request(sequence, is_exact); }
    double share_kept(int32_t sequence) const { return lossy.share_kept(sequence); }
    bool   may_be_lossy(int32_t sequence) const { return lossy.may_leave_out(sequence); }
    bool   is_lossy() const { return lossy.is_on(); }
    double take_share_left_out() { return lossy.take_share_left_out(); }

    int64_t n_tokens_counted = INT64_MAX; // of a forward, the first ones: others are computed, and nothing is learned from them
    bool    is_exact         = false;     // nothing is left out now, whatever is lossy

    // spac_split_ops
    bool choice_wanted() const override { return lossy.routes(); }
    void choose_again(const spac_moe_layer & layer, const ggml_tensor * logits, const ggml_tensor * ids, int32_t * chosen) override;
    bool weights_wanted() const override { return (lossy.is_on() && !lossy.routes()) || (!demand.empty() && demand[0]->wants_weights()); }
    void dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * weights, const ggml_tensor * cur, int32_t * ids_device, int32_t * ids_host) override;
    void collect(const spac_moe_layer & layer, float * rows, size_t n_rows) override;
    void device_done(const spac_moe_layer & layer) override;
    void host_done(const spac_moe_layer & layer) override;
    void plan_host(const spac_moe_layer & layer, const int32_t * ids_host, int64_t n_tokens, int n_threads) override;
    void compute_host(const spac_moe_layer & layer, const ggml_tensor * cur, float * rows) override;
    void plan_device(const spac_moe_layer & layer, const spac_slot_group & group, int64_t n_tokens, int n_threads) override;
    void compute_device(const spac_moe_layer & layer, const ggml_tensor * cur, float * rows) override;

  private:
    // of a layer's call in progress, in microseconds
    struct call_times {
        uint64_t submit = 0, dispatch = 0, device = 0;
        uint64_t n_device = 0, host_bytes = 0; // distinct experts; of the host's
    };

    void                         note_device(const spac_moe_layer & layer, uint64_t now);
    void                         close();
    void                         begin_layer(int il, uint64_t now);
    void                         pin_experts(const spac_moe_layer & layer, const ggml_tensor * ids);
    std::vector<uint8_t>         experts_there(const spac_moe_layer & layer) const;
    const std::vector<int32_t> & sequences_of(int64_t n_tokens) const;
    void                         show_weights();
    void                         ask(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor * weights);
    uint32_t                     n_rows_kept(size_t i) const; // of the layer's i-th expert: not left out
    void                         share_out(const spac_moe_layer & layer);
    void                         record_split(const spac_moe_layer & layer);
    void                         leave_out(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor & weights);
    void                         substitute(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor & weights);
    void                         write_ids(const spac_moe_layer & layer, const ggml_tensor * ids, int32_t * ids_device, int32_t * ids_host);

    spac_board &             board;
    const spac_device_caches cache;
    spac_decisions &         decisions;
    spac_host_work &         host;
    spac_memory_tier * const tier;
    spac_timeline &          timeline;
    spac_routing_log &       log;
    spac_lossy &             lossy;
    spac_cache_routing       routing; // where lossy.routes()
    spac_device_clock        clock;

    const std::vector<spac_demand_loads *> demand;

    const bool fills;
    const int  il_to_publish;

    std::vector<int32_t>    sequence_of_token, sequence_of_output; // of the graph in progress, where something may be left out
    std::atomic<bool>       in_progress{ false };
    bool                    any_device = false, any_host = false;
    int                     last_il       = -1;
    bool                    is_first      = true; // the layer in progress
    uint64_t                last_dispatch = 0;
    std::vector<call_times> times; // [n_layer]

    // the layer in progress
    spac_activations      activations;
    std::vector<int32_t>  slots;                 // of each distinct expert, or -1
    std::vector<size_t>   residents;             // of the distinct experts, those that are on the device
    std::vector<int32_t>  ids_copy;              // [n_expert_used * n_tokens]
    std::vector<int32_t>  slot_of;               // [n_expert], of those in on_device
    std::vector<int32_t>  on_device;             // [n_expert_used * n_tokens] experts or -1, as ids_host
    std::vector<uint32_t> n_rows_left_out;       // of each distinct expert
    std::vector<uint32_t> n_rows_exact;          // of each distinct expert, where demand wants it
    std::vector<uint8_t>  copy_of;               // of each distinct expert, where something may be left out: 0: exact
    std::vector<int32_t>  index_of;              // [n_expert_used * n_tokens] among the distinct ones, or -1
    std::vector<double>   weight_of;             // of each distinct expert, where demand wants it
    std::vector<int32_t>  stands_in, slot_of_it; // for each distinct expert: another one or -1, and its slot
    std::vector<uint8_t>  is_there;              // [n_expert_used * n_tokens] where something may be left out
};
