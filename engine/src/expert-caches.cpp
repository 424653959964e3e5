#include "expert-caches.h"

#include "clock.h"

#include <algorithm>

bool spac_expert_caches::can_stage() const {
    return std::all_of(caches.begin(), caches.end(), [](const spac_expert_cache * cache) { return cache->can_stage(); });
}

// each takes the loads of its own layers
void spac_expert_caches::apply(const uint8_t * utility, const uint8_t * tau, const uint32_t * load, size_t n_load,
                               const std::vector<uint64_t> & byte_budgets) const {
    for (size_t i = 0; i < caches.size(); i++) {
        caches[i]->apply(utility, tau, load, n_load, i < byte_budgets.size() ? byte_budgets[i] : UINT64_MAX);
    }
}

void spac_expert_caches::cancel() const {
    for (spac_expert_cache * cache : caches) {
        cache->cancel();
    }
}

void spac_expert_caches::unpin_all() const {
    for (spac_expert_cache * cache : caches) {
        cache->unpin_all();
    }
}

void spac_expert_caches::begin_forward() const {
    for (spac_expert_cache * cache : caches) {
        cache->begin_forward();
    }
}

void spac_expert_caches::idle() const {
    for (spac_expert_cache * cache : caches) {
        cache->idle();
    }
}

bool spac_expert_caches::wait_idle(int32_t timeout_ms) const {
    const uint64_t end = spac_now_us() + 1000ull * std::max(0, timeout_ms);
    return std::all_of(caches.begin(), caches.end(), [&](spac_expert_cache * cache) {
        const uint64_t now = spac_now_us();
        return cache->wait_idle(now < end ? (int32_t) ((end - now + 999) / 1000) : 0);
    });
}

void spac_expert_caches::check() const {
    for (spac_expert_cache * cache : caches) {
        cache->check();
    }
}
