// Computes a layer's host experts with the engine's own kernels, on threads that stay awake for a moment between layers.
// The thread that waits helps with what is left when it comes, which is after the device is done.
#pragma once

#include "host-experts.h"
#include "worker.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

struct spac_kernel_worker : spac_host_worker {
    // stays_awake: for a moment after a layer; costs more than it gains where others need the cores
    // n_threads: the worker's own, 1 or more
    // cpus: one per thread in turn, the first for the thread that waits, which stays where it is; empty: anywhere
    // tier: of experts on disk, or NULL
    spac_kernel_worker(const spac_kernels & kernels, int n_threads, bool stays_awake, const std::vector<int> & cpus, spac_memory_tier * tier = nullptr);
    ~spac_kernel_worker() override;

    void          submit(const spac_moe_layer * layer, const ggml_tensor * cur, const int32_t * ids_host, const int32_t * ids, int n_tokens) override;
    const float * wait(uint64_t & busy_us) override;

    // openings and closings of the gate so far: the only moments at which its threads meet, two for a layer with work
    uint64_t n_switches() const { return gate; }

    // a graph that was aborted collects nothing: its last layer is at an end now
    void abandon();

    // no forward is in progress: its threads need not stay awake
    void rest() { is_resting = true; }

  private:
    void run();
    void stop();
    bool next_round(uint64_t & seen);
    bool has_opened(uint64_t & seen) const;
    void open();
    void close();
    void work();
    void copy_input(const ggml_tensor * cur);
    void clear_absent(const spac_moe_layer & layer, const int32_t * ids_host, size_t n_rows);

    // the layer in progress: written by submit while no thread is inside
    spac_host_experts  experts;
    spac_host_input    in = {};
    std::vector<float> input, rows;
    uint64_t           t_begin = 0;

    const int  n_threads;
    const bool stays_awake;

    // A thread counts itself in and then looks at the gate again; who closes the gate then looks at the count. All four are
    // sequentially consistent, so either the thread sees that it came too late, or it is waited for.
    alignas(64) std::atomic<uint64_t> gate{ 0 }; // counts openings and closings: odd while a round is open
    alignas(64) std::atomic<int> n_inside{ 0 };
    alignas(64) std::atomic<uint64_t> t_end{ 0 }; // when the last task was done
    std::atomic<bool> is_resting{ true };         // no forward is in progress: sleep at once

    std::mutex              mutex; // of sleeping and waking
    std::condition_variable opened;
    std::atomic<int>        n_asleep{ 0 };   // changed under the mutex, before a look at the gate; read after opening it
    bool                    stopped = false; // under the mutex

    std::vector<std::thread> threads;
};
