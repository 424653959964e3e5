// Asks routers early: a layer's router input is put through the router of a later layer, on a thread of its own, and what
// that one is likely to choose is told to the expert cache before it runs, and to the memory tier where there is one.
#pragma once

#include "base/job-thread.h"
#include "board/board.h"
#include "cache/device-caches.h"
#include "routers.h"
#include "tier/memory-tier.h"

#include <cstdint>
#include <map>
#include <vector>

struct spac_next_layer {
    // layers: that are split, in the order of a graph; distance: in those of them with a router, at least 1
    // tier: of experts on disk, or NULL; all outlive it, as do graphs with its nodes; throws as spac_routers does
    spac_next_layer(spac_board & board, const spac_device_caches & cache, const std::vector<const spac_moe_layer *> & layers, int distance,
                    spac_memory_tier * tier = nullptr);

    // one node on the CPU that reads the router's input, and nothing else; does nothing for layers without a router
    void add_node(const llama_moe_hook_params & p, ggml_backend_t backend);

    // while a graph runs: the router input [n_embd, n_tokens] of the layer with this index of routers.layers()
    void see(size_t index, const ggml_tensor * input);

    void stop() { thread.stop(); } // nothing reads the routers any more
    void wait_idle() { thread.wait_idle(); }

  private:
    struct node {
        spac_next_layer * next_layer;
        size_t            index;
    };
    struct job {
        uint32_t           il; // of the layer that is asked
        uint64_t           forward;
        uint64_t           due_us; // when that layer is likely to run
        int64_t            n_tokens;
        std::vector<float> input;
    };

    static void run_node(ggml_tensor * dst, int ith, int nth, void * user_data);

    void     note_time(size_t index, uint64_t now);
    uint64_t due_us(size_t index, uint64_t now) const;
    void     work_off(const job & j);

    const spac_device_caches cache;
    spac_ahead_stats &       stats;
    spac_memory_tier *       tier;
    spac_routers             routers;
    const size_t             distance;
    std::map<int, node>      nodes; // by il

    // of the graph's thread
    size_t              last_index = SIZE_MAX; // of the layers seen
    uint64_t            last_us    = 0;        // when
    std::vector<double> layer_us;              // [n_layer] from one to the next, averaged; 0: not known

    spac_job_thread thread; // the first to end
};
