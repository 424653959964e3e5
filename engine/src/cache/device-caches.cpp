#include "device-caches.h"

#include "base/clock.h"

#include <algorithm>
#include <numeric>

bool spac_device_caches::can_stage() const {
    return std::all_of(caches.begin(), caches.end(), [](spac_expert_cache * cache) { return cache->can_stage(); });
}

// each takes the loads of its own layers
void spac_device_caches::apply(const uint8_t * utility, const uint8_t * tau, const uint32_t * load, size_t n_load,
                               const std::vector<uint64_t> & byte_budgets) const {
    for (size_t i = 0; i < caches.size(); i++) {
        caches[i]->apply(utility, tau, load, n_load, i < byte_budgets.size() ? byte_budgets[i] : UINT64_MAX);
    }
}

// each looks at its own layers
void spac_device_caches::want_whole(const uint8_t * wanted) const {
    for (spac_expert_cache * cache : caches) {
        cache->want_whole(wanted);
    }
}

std::vector<int32_t> spac_device_caches::whole_layers(uint64_t & version) const {
    std::vector<int32_t> first;
    version = 0;
    for (spac_expert_cache * cache : caches) {
        uint64_t                   version_of;
        const std::vector<int32_t> of = cache->whole_layers(version_of);
        version += version_of;
        first.resize(of.size(), -1);
        std::transform(of.begin(), of.end(), first.begin(), first.begin(), [](int32_t a, int32_t b) { return std::max(a, b); });
    }
    return first;
}

// rises whenever one of theirs does
uint64_t spac_device_caches::whole_version() const {
    return std::accumulate(caches.begin(), caches.end(), (uint64_t) 0, [](uint64_t sum, const spac_expert_cache * cache) { return sum + cache->whole_version(); });
}

void spac_device_caches::enter_graph(const std::vector<int32_t> & whole, bool may_reserve) const {
    for (spac_expert_cache * cache : caches) {
        cache->enter_graph(whole, may_reserve);
    }
}

void spac_device_caches::cancel() const {
    for (spac_expert_cache * cache : caches) {
        cache->cancel();
    }
}

void spac_device_caches::unpin_all() const {
    for (spac_expert_cache * cache : caches) {
        cache->unpin_all();
    }
}

void spac_device_caches::begin_forward() const {
    for (spac_expert_cache * cache : caches) {
        cache->begin_forward();
    }
}

void spac_device_caches::idle() const {
    for (spac_expert_cache * cache : caches) {
        cache->idle();
    }
}

bool spac_device_caches::wait_idle(int32_t timeout_ms) const {
    const uint64_t end = spac_now_us() + 1000ull * std::max(0, timeout_ms);
    return std::all_of(caches.begin(), caches.end(), [&](spac_expert_cache * cache) {
        const uint64_t now = spac_now_us();
        return cache->wait_idle(now < end ? (int32_t) ((end - now + 999) / 1000) : 0);
    });
}

void spac_device_caches::check() const {
    for (spac_expert_cache * cache : caches) {
        cache->check();
    }
}
