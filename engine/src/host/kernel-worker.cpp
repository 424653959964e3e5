#include "kernel-worker.h"

#include "base/clock.h"
#include "base/cpus.h"

#include <chrono>
#include <cstring>

// how long to stay awake: the next layer, or another thread's last task, comes soon while a forward is in progress, and
// waking a thread takes about as long
static constexpr uint64_t AWAKE_US = 100;
static constexpr uint64_t NAP_US   = 50; // between looks, after that

static void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

spac_kernel_worker::spac_kernel_worker(const spac_kernels & kernels, int n_threads, bool stays_awake, const std::vector<int> & cpus, spac_memory_tier * tier) :
    experts(kernels, tier), n_threads(n_threads), stays_awake(stays_awake) {
    try {
        for (int i = 0; i < n_threads; i++) {
            threads.emplace_back([this] { run(); });
            if (!cpus.empty()) {
                spac_pin_thread(threads.back(), cpus[(i + 1) % cpus.size()]);
            }
        }
    } catch (...) { // the system has no thread left
        stop();
        throw;
    }
}

spac_kernel_worker::~spac_kernel_worker() {
    stop();
}

void spac_kernel_worker::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    opened.notify_all();
    for (std::thread & t : threads) {
        t.join();
    }
}

void spac_kernel_worker::copy_input(const ggml_tensor * cur) {
    const int64_t n = cur->ne[0], n_used = cur->ne[1], n_tokens = cur->ne[2];
    input.resize(n * n_used * n_tokens);
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        memcpy(&input[i * n], (const char *) cur->data + i % n_used * cur->nb[1] + i / n_used * cur->nb[2], n * sizeof(float));
    }
    in = { (const char *) input.data(), n * sizeof(float), n * n_used * sizeof(float) };
}

void spac_kernel_worker::clear_absent(const spac_moe_layer & layer, const int32_t * ids_host, size_t n_rows) {
    rows.resize(n_rows * layer.n_embd);
    for (size_t i = 0; i < n_rows; i++) {
        if (ids_host[i] < 0) {
            memset(&rows[i * layer.n_embd], 0, layer.n_embd * sizeof(float));
        }
    }
}

void spac_kernel_worker::submit(const spac_moe_layer * layer, const ggml_tensor * cur, const int32_t * ids_host, const int32_t *, int n_tokens) {
    abandon();
    clear_absent(*layer, ids_host, layer->n_expert_used * n_tokens);
    experts.plan(*layer, ids_host, n_tokens, n_threads + 1); // with the one that waits
    t_begin = spac_now_us();
    t_end   = t_begin;
    if (experts.has_work()) { // else wake no thread
        copy_input(cur);
        open();
    }
}

void spac_kernel_worker::abandon() {
    if (gate % 2 == 1) { // not collected
        close();
    }
}

const float * spac_kernel_worker::wait(uint64_t & busy_us) {
    if (experts.has_work()) {
        work();
        close();
    }
    busy_us = t_end - t_begin;
    return rows.data();
}

void spac_kernel_worker::open() {
    is_resting = false;
    gate.fetch_add(1);
    if (n_asleep > 0) {
        mutex.lock(); // a thread between its look at the gate and its sleep would miss the call
        mutex.unlock();
        opened.notify_all();
    }
}

// returns when no thread is inside: every task is done then
void spac_kernel_worker::close() {
    gate.fetch_add(1); // a thread that comes after this stays out
    const uint64_t t_nap = spac_now_us() + AWAKE_US;
    while (n_inside > 0) {
        if (spac_now_us() < t_nap) {
            std::this_thread::yield(); // more threads than cores: the one we wait for may not be running
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(NAP_US));
        }
    }
}

// who finds nothing left to do may have come long after the end
void spac_kernel_worker::work() {
    if (!experts.work(in, rows.data())) {
        return;
    }
    const uint64_t t = spac_now_us();
    for (uint64_t last = t_end; last < t && !t_end.compare_exchange_weak(last, t);) {
    }
}

void spac_kernel_worker::run() {
    for (uint64_t seen = 0; next_round(seen);) {
        n_inside.fetch_add(1);
        if (gate == seen) {
            work();
        }
        n_inside.fetch_sub(1);
    }
}

bool spac_kernel_worker::has_opened(uint64_t & seen) const {
    const uint64_t g = gate;
    if (g % 2 == 0 || g == seen) {
        return false;
    }
    seen = g;
    return true;
}

// waits for a round after the one seen, awake for a while, then asleep; false: the worker ends
bool spac_kernel_worker::next_round(uint64_t & seen) {
    const uint64_t t_sleep = spac_now_us() + AWAKE_US;
    while (stays_awake && !is_resting && spac_now_us() < t_sleep) {
        if (has_opened(seen)) {
            return true;
        }
        pause_briefly();
    }
    std::unique_lock<std::mutex> lock(mutex);
    n_asleep.fetch_add(1);
    opened.wait(lock, [&] { return stopped || has_opened(seen); });
    n_asleep.fetch_sub(1);
    return !stopped;
}
