// What the tests share: a check that cannot be compiled out, and a fake device.
#pragma once

#include "cache/expert-cache.h"
#include "untried/staged-loads.h"
#include "untried/whole-loads.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                \
        }                                                                           \
    } while (0)

// an expert cache with memory for what an engine publishes
struct cache_fixture {
    std::vector<uint8_t> residency;
    spac_counters        counters            = {};
    spac_ahead_stats     ahead[SPAC_N_AHEAD] = {};
    spac_expert_cache    cache;
    spac_staged_loads    staged{ cache };
    spac_whole_loads     whole{ cache };
    uint32_t             n_layer, n_expert;

    std::vector<uint8_t> utility, tau;

    // n_layer layers in one group of n_slots slots; an expert has 100 bytes
    cache_fixture(uint32_t n_layer, uint32_t n_expert, int32_t n_slots, bool evict = true) :
        residency(n_layer * n_expert), cache(std::vector<spac_expert_cache::layer_desc>(n_layer, { 0, n_expert, 100, true }), { n_slots }, n_expert, evict,
                                             { residency.data(), &counters, ahead }),
        n_layer(n_layer), n_expert(n_expert), utility(n_layer * n_expert), tau(n_layer, 1) {}

    uint32_t key(uint32_t il, uint32_t ie) const { return il * n_expert + ie; }

    void apply(const std::vector<uint32_t> & loads, uint64_t budget = UINT64_MAX) {
        cache.apply(utility.data(), tau.data(), loads.data(), loads.size(), budget);
    }

    // asks for one expert as a graph would; leaves it pinned
    int32_t pin(uint32_t il, int32_t ie) {
        const uint32_t n_rows = 1;
        int32_t        slot;
        cache.pin(il, &ie, &n_rows, 1, &slot);
        return slot;
    }
};
