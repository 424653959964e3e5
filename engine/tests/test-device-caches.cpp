// The caches of several devices: each has the layers of its own, all write one set of counters.
#include "base/clock.h"
#include "cache/device-caches.h"
#include "cache/prefetch-worker.h"
#include "check.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

static constexpr uint32_t N_LAYER = 4, N_EXPERT = 8;
static constexpr int32_t  N_SLOTS = 6; // of each device
static constexpr uint64_t BYTES   = 100;

// layers 0 and 1 are device 0's, 2 and 3 device 1's; each device has one layout group
struct two_devices {
    std::vector<uint8_t>               residency = std::vector<uint8_t>(N_LAYER * N_EXPERT);
    spac_counters                      counters  = {};
    spac_device_stats                  stats[2]  = {};
    std::mutex                         mutex;
    std::unique_ptr<spac_expert_cache> caches[2];
    spac_device_caches                 cache;
    std::vector<uint8_t>               utility = std::vector<uint8_t>(N_LAYER * N_EXPERT, 1), tau = std::vector<uint8_t>(N_LAYER, 1);

    two_devices() {
        for (int d = 0; d < 2; d++) {
            std::vector<spac_expert_cache::layer_desc> layers(N_LAYER);
            layers[2 * d] = layers[2 * d + 1] = { d, N_EXPERT, BYTES };
            std::vector<int32_t> n_slots(2, 0);
            n_slots[d] = N_SLOTS;
            caches[d]  = std::make_unique<spac_expert_cache>(layers, n_slots, N_EXPERT, true,
                                                             spac_expert_cache::published{ residency.data(), &counters, nullptr, nullptr, &stats[d], &mutex });
        }
        cache = {
            { caches[0].get(), caches[1].get() },
            { 0, 0, 1, 1 }
        };
    }

    std::unique_ptr<spac_prefetch_worker> start(int device, uint64_t us = 0) {
        return std::make_unique<spac_prefetch_worker>(*caches[device], [us](const spac_load &) {
            std::this_thread::sleep_for(std::chrono::microseconds(us));
            return true; }, 0);
    }

    int32_t pin(uint32_t il, int32_t ie) {
        const uint32_t n_rows = 1;
        int32_t        slot   = -1;
        cache.pin(il, &ie, &n_rows, 1, &slot);
        return slot;
    }
};

static const std::vector<uint32_t> TWO_OF_EACH = { 0 * N_EXPERT + 1, 1 * N_EXPERT + 2, 2 * N_EXPERT + 3, 3 * N_EXPERT + 4 };

// each takes the loads of its own layers, into its own slots, and only while its own worker runs
static void test_loads_go_to_their_device() {
    two_devices f;
    f.cache.apply(f.utility.data(), f.tau.data(), TWO_OF_EACH.data(), TWO_OF_EACH.size(), {});
    {
        const auto worker = f.start(1);
        CHECK(f.caches[1]->wait_idle(5000));
        CHECK(!f.cache.wait_idle(0)); // the other one's wait
    }
    CHECK(f.stats[0].n_loads == 0 && f.stats[1].n_loads == 2 && f.stats[1].loaded_bytes == 2 * BYTES);
    CHECK(f.pin(0, 1) == -1 && f.pin(2, 3) >= 0 && f.pin(3, 4) >= 0);
    {
        const auto worker = f.start(0);
        CHECK(f.cache.wait_idle(5000));
    }
    CHECK(f.stats[0].n_loads == 2 && f.counters.n_loads == 4 && f.counters.n_hit == 2 && f.counters.n_miss == 1);
    CHECK(f.cache.slot_of(0, 1) >= 0 && f.cache.slot_of(1, 2) >= 0);
    f.cache.check();
}

// a device that is out of budget keeps no other one waiting; what is missing has no limit
static void test_budgets() {
    two_devices f;
    f.cache.apply(f.utility.data(), f.tau.data(), TWO_OF_EACH.data(), TWO_OF_EACH.size(), { BYTES });
    const auto first = f.start(0), second = f.start(1);
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.stats[0].n_loads == 1 && f.stats[1].n_loads == 2);
    f.cache.begin_forward();
    CHECK(f.cache.wait_idle(5000) && f.stats[0].n_loads == 2);
    f.cache.check();
}

// the graph goes through the layers of both while both copy, one of them slowly
static void test_threads() {
    two_devices           f;
    const auto            fast = f.start(0, 10), slow = f.start(1, 500);
    std::vector<uint32_t> all(N_LAYER * N_EXPERT);
    for (uint32_t key = 0; key < all.size(); key++) {
        all[key] = key;
    }
    for (int i = 0; i < 200; i++) {
        for (size_t key = 0; key < all.size(); key++) {
            f.utility[key] = (uint8_t) ((key * 7 + i) % 5);
        }
        f.cache.apply(f.utility.data(), f.tau.data(), all.data(), all.size(), {});
        f.cache.begin_forward();
        for (uint32_t il = 0; il < N_LAYER; il++) {
            f.pin(il, (int32_t) (i % N_EXPERT));
            f.cache.unpin_all();
        }
    }
    CHECK(f.cache.wait_idle(5000)); // the last decision's loads, if nothing before
    f.cache.cancel();
    CHECK(f.cache.wait_idle(5000));
    std::lock_guard<std::mutex> lock(f.mutex);
    CHECK(f.counters.n_loads == f.stats[0].n_loads + f.stats[1].n_loads && f.stats[0].n_loads > 0 && f.stats[1].n_loads > 0);
    CHECK(f.counters.n_hit + f.counters.n_miss + f.counters.n_late == 200 * N_LAYER && f.counters.n_pinned_steals == 0);
}

// a layer of one device unpins what the layer before used, on whichever device that was
static void test_layers_of_both() {
    two_devices f;
    f.cache.apply(f.utility.data(), f.tau.data(), TWO_OF_EACH.data(), TWO_OF_EACH.size(), {});
    {
        const auto first = f.start(0), second = f.start(1);
        CHECK(f.cache.wait_idle(5000));
    }
    const uint32_t n_rows = 1;
    const int32_t  of_0 = 2, of_1 = 3;
    int32_t        slot_0, slot_1;
    f.cache.run_layer(1, &of_0, &n_rows, 1, &slot_0, true, 0);
    const auto & pool_0 = f.caches[0]->table.groups[0].slots;
    const auto & pool_1 = f.caches[1]->table.groups[1].slots;
    CHECK(slot_0 >= 0 && pool_0[slot_0].n_pins == 1);
    f.cache.run_layer(2, &of_1, &n_rows, 1, &slot_1, false, 0);
    CHECK(slot_1 >= 0 && pool_0[slot_0].n_pins == 0 && pool_1[slot_1].n_pins == 1);
}

int main() {
    test_layers_of_both();
    test_loads_go_to_their_device();
    test_budgets();
    test_threads();
    return 0;
}
