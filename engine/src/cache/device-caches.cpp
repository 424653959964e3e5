#include "device-caches.h"

#include "base/clock.h"

#include <algorithm>

void spac_device_caches::run_layer(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots, bool keeps_pins,
                                   size_t n_fill) const {
    for (size_t i = 0; !keeps_pins && i < caches.size(); i++) {
        if (i != index_of(il)) {
            caches[i]->unpin_all();
        }
    }
    of(il).run_layer(il, experts, n_rows, n, slots, keeps_pins, n_fill);
}

// each takes the loads of its own layers
void spac_device_caches::apply(const uint8_t * utility, const uint8_t * tau, const uint32_t * load, size_t n_load,
                               const std::vector<uint64_t> & byte_budgets) const {
    for (size_t i = 0; i < caches.size(); i++) {
        caches[i]->apply(utility, tau, load, n_load, i < byte_budgets.size() ? byte_budgets[i] : UINT64_MAX);
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
