// Computes a layer's host experts with ggml's kernels, on threads of its own, while the device works.
#pragma once

#include "worker.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

struct spac_ggml_worker : spac_host_worker {
    // layers: all that will be submitted; max_batch: most tokens at once; cpus: one per thread in turn, or empty for anywhere
    spac_ggml_worker(const std::vector<const spac_moe_layer *> & layers, int max_batch, int n_threads, const std::vector<int> & cpus);
    ~spac_ggml_worker() override;

    void          submit(const spac_moe_layer * layer, const ggml_tensor * cur, const int32_t * ids_host, const int32_t * ids, int n_tokens) override;
    const float * wait(uint64_t & busy_us) override;

  private:
    // a layer's nodes at one width; memory comes from the arena
    struct graph {
        ggml_context * ctx      = nullptr;
        ggml_cgraph *  gf       = nullptr;
        ggml_tensor *  cur      = nullptr;
        ggml_tensor *  ids_host = nullptr;
        ggml_tensor *  ids      = nullptr; // only where the layer has scales
        ggml_tensor *  rows     = nullptr;
        size_t         bytes    = 0;
    };

    graph   build(const spac_moe_layer * layer, int n_tokens) const;
    void    place(graph & g) const;
    graph & graph_of(const spac_moe_layer * layer, int n_tokens);
    void    run();

    std::map<std::pair<const spac_moe_layer *, int>, graph> graphs;

    struct free_threadpool {
        void operator()(ggml_threadpool_t t) const { ggml_threadpool_free(t); }
    };

    std::unique_ptr<ggml_threadpool, free_threadpool> threadpool;
    ggml_backend_ptr                                  backend;
    ggml_backend_buffer_ptr                           arena;

    std::mutex              mutex; // guards the fields below
    std::condition_variable changed;
    graph *                 submitted = nullptr; // being computed
    graph *                 done      = nullptr;
    uint64_t                us        = 0;
    bool                    stopped   = false;

    std::thread thread;
};
