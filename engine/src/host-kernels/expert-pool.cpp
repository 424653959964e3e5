#include "expert-pool.h"

#include "../clock.h"

#include <algorithm>
#include <cstring>

// the last tasks of other threads take about this long: cheaper to wait for awake
static constexpr uint64_t AWAKE_US = 50;

spac_expert_pool::spac_expert_pool(const spac_kernels & kernels, int n_threads) :
    experts(kernels), n_threads(n_threads) {
    // at least one beside the thread that waits, which may be at work on the device when the experts arrive
    for (int i = 0; i < std::max(1, n_threads - 1); i++) {
        threads.emplace_back([this] { run(); });
    }
}

spac_expert_pool::~spac_expert_pool() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    opened.notify_all();
    for (std::thread & t : threads) {
        t.join();
    }
}

void spac_expert_pool::copy_input(const ggml_tensor * cur) {
    const int64_t n = cur->ne[0], n_used = cur->ne[1], n_tokens = cur->ne[2];
    input.resize(n * n_used * n_tokens);
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        memcpy(&input[i * n], (const char *) cur->data + i % n_used * cur->nb[1] + i / n_used * cur->nb[2], n * sizeof(float));
    }
    in = { (const char *) input.data(), n * sizeof(float), n * n_used * sizeof(float) };
}

void spac_expert_pool::clear_absent(const spac_moe_layer & layer, const int32_t * ids_host, size_t n_rows) {
    rows.resize(n_rows * layer.n_embd);
    for (size_t i = 0; i < n_rows; i++) {
        if (ids_host[i] < 0) {
            memset(&rows[i * layer.n_embd], 0, layer.n_embd * sizeof(float));
        }
    }
}

void spac_expert_pool::submit(const spac_moe_layer * layer, const ggml_tensor * cur, const int32_t * ids_host, const int32_t *, int n_tokens) {
    clear_absent(*layer, ids_host, layer->n_expert_used * n_tokens);
    experts.plan(*layer, ids_host, n_tokens, n_threads);
    t_begin = spac_now_us();
    if (!experts.has_work()) {
        std::lock_guard<std::mutex> lock(mutex);
        t_end = t_begin; // wake nobody
        return;
    }
    copy_input(cur);
    {
        std::lock_guard<std::mutex> lock(mutex);
        is_open = true;
        round++;
    }
    opened.notify_all();
}

const float * spac_expert_pool::wait(uint64_t & busy_us) {
    if (experts.has_work()) {
        experts.work(in, rows.data());
        close();
    }
    std::lock_guard<std::mutex> lock(mutex);
    busy_us = t_end - t_begin;
    return rows.data();
}

// returns when no thread is inside: every task is done then
void spac_expert_pool::close() {
    const uint64_t t = spac_now_us();

    std::unique_lock<std::mutex> lock(mutex);
    is_open = false; // who wakes up only now stays out
    t_end   = std::max(t_end, t);
    lock.unlock();
    while (n_inside.load(std::memory_order_acquire) > 0 && spac_now_us() < t + AWAKE_US) {
        std::this_thread::yield();
    }
    lock.lock();
    left.wait(lock, [&] { return n_inside.load(std::memory_order_relaxed) == 0; });
}

void spac_expert_pool::run() {
    uint64_t                     seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        opened.wait(lock, [&] { return stopped || (is_open && round != seen); });
        if (stopped) {
            return;
        }
        seen = round;
        n_inside++;
        lock.unlock();
        experts.work(in, rows.data());
        lock.lock();
        n_inside--;
        t_end = std::max(t_end, spac_now_us());
        if (n_inside == 0) {
            left.notify_all();
        }
    }
}
