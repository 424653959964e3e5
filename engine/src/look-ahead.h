// Asks routers early: a layer's router input is put through the router of a later layer, on a thread of its own, and what
// that one is likely to choose is told to the expert cache before it runs.
#pragma once

#include "activations.h"
#include "board.h"
#include "expert-cache.h"
#include "layers.h"
#include "routers.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

struct spac_look_ahead {
    // distance: in MoE layers with a router, at least 1
    // all outlive it, as do graphs with its nodes; throws as spac_routers does
    spac_look_ahead(spac_board & board, spac_expert_cache & cache, const spac_layers & layers, int distance);
    ~spac_look_ahead() { stop(); }

    // one node on the CPU that reads the router's input and ids, and nothing else; does nothing for layers without a router
    void add_node(const llama_moe_hook_params & p);

    // while a graph runs: a layer's router input [n_embd, n_tokens] and the ids that it chose, before its experts run
    void see(const spac_moe_layer & layer, const ggml_tensor * input, const ggml_tensor * ids);

    void stop();      // nothing reads the routers any more
    void wait_idle(); // until all that was seen is worked off

  private:
    struct node {
        spac_look_ahead *      look_ahead;
        const spac_moe_layer * layer;
        size_t                 index; // of routers.layers()
    };
    struct job {
        size_t             index; // of the layer that is asked
        uint64_t           forward;
        uint64_t           due_us; // when that layer is likely to run
        int64_t            n_tokens;
        std::vector<float> input; // [n_embd, n_tokens]
    };
    struct guess {
        uint64_t             forward = 0; // 0: none yet
        std::vector<int32_t> experts;
    };

    static void run_node(ggml_tensor * dst, int ith, int nth, void * user_data);

    void     note_time(size_t index, uint64_t now);
    uint64_t due_us(size_t index, uint64_t now) const;
    void     check(size_t index, const ggml_tensor * ids);
    void     submit(size_t index, const ggml_tensor * input, uint64_t now);
    void     run();
    void     work_off(const job & j);

    spac_expert_cache & cache;
    spac_ahead_stats &  stats;
    spac_routers        routers;
    const size_t        distance;

    std::map<int, node> nodes; // by il

    // of the graph's thread
    size_t                last_index = SIZE_MAX; // of the layers that ran in this forward
    uint64_t              last_us    = 0;        // when it did
    std::vector<double>   layer_us;              // [n_layer] from one MoE layer to the next, averaged; 0: not known
    std::vector<float>    rows;
    spac_activations      activations;
    std::vector<uint32_t> totals; // that nobody reads

    std::mutex              mutex; // guards all below
    std::condition_variable changed;
    std::deque<job>         jobs;
    std::vector<guess>      guesses; // [n_layer]
    uint64_t                forward = 0;
    size_t                  n_seen  = 0; // layers of this forward that ran
    bool                    is_busy = false, stopped = false;

    std::thread thread;
};
