// Computes a layer's host experts with the engine's own kernels, on threads that sleep between layers.
// The thread that waits helps, so n_threads cores are busy when it does.
#pragma once

#include "../host-worker.h"
#include "host-experts.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

struct spac_expert_pool : spac_host_worker {
    spac_expert_pool(const spac_kernels & kernels, int n_threads);
    ~spac_expert_pool() override;

    void          submit(const spac_moe_layer * layer, const ggml_tensor * cur, const int32_t * ids_host, const int32_t * ids, int n_tokens) override;
    const float * wait(uint64_t & busy_us) override;

  private:
    void run();
    void close();
    void copy_input(const ggml_tensor * cur);
    void clear_absent(const spac_moe_layer & layer, const int32_t * ids_host, size_t n_rows);

    // the layer in progress: written by submit while no thread is inside
    spac_host_experts  experts;
    spac_host_input    in = {};
    std::vector<float> input, rows;
    uint64_t           t_begin = 0;

    const int n_threads;

    std::mutex              mutex; // guards the fields below
    std::condition_variable opened, left;
    bool                    is_open = false, stopped = false;
    uint64_t                round = 0;     // of submits
    uint64_t                t_end = 0;     // when the last thread left
    std::atomic<int>        n_inside{ 0 }; // threads in work(); changed under the mutex, read without it

    std::vector<std::thread> threads;
};
