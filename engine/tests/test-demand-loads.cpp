// What a policy to compare with copies for a layer that runs: who leaves, who is pinned, who is left to the host, and texts that
// name no policy. Books equal to the lab's: tests/lab/test_lab_engine.py.
#include "base/status.h"
#include "cache/demand-loads.h"

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <thread>

static constexpr uint32_t N_LAYER = 2, N_EXPERT = 4;

struct fixture {
    uint8_t           residency[N_LAYER * N_EXPERT] = {};
    spac_counters     counters                      = {};
    spac_expert_cache cache;
    spac_demand_loads demand;

    fixture(int32_t n_slots, const char * policy, bool evict = true) :
        cache({
                  N_LAYER, { 0, N_EXPERT, 100, false }
    },
              { n_slots }, N_EXPERT, evict, { residency, &counters }),
        demand(cache, { "policy", policy }) {}

    // a layer runs: slots of its experts once what it waits for is there
    std::vector<int32_t> run(uint32_t il, const std::vector<int32_t> & experts, std::vector<uint32_t> n_rows = {}, double host_us = 0) {
        std::vector<int32_t> slots(experts.size());
        n_rows.resize(experts.size(), 1);
        cache.run_layer(il, experts.data(), n_rows.data(), experts.size(), slots.data(), false, 0);
        demand.ask(il, experts.data(), n_rows.data(), nullptr, experts.size(), slots.data(), host_us);
        std::thread worker([&] { copy_all(); });
        demand.wait(il, experts.data(), slots.data(), experts.size());
        worker.join();
        return slots;
    }

    void copy_all(uint64_t us = 10) {
        spac_load load;
        while (cache.wait_for_load(load) == spac_expert_cache::wait_result::LOAD) {
            cache.finish_load(load, true, us);
        }
    }

    bool is_here(uint32_t il, uint32_t ie) const { return residency[il * N_EXPERT + ie] == SPAC_RESIDENCY_RESIDENT; }
};

static void test_fetch() {
    fixture f(2, "lru+fetch");
    f.cache.begin_forward();
    assert((f.run(0, { 3, 1 }) == std::vector<int32_t>{ 0, 1 })); // free slots first
    assert((f.run(1, { 2 }) == std::vector<int32_t>{ 0 }));       // in place of the one that was asked for first
    assert(!f.is_here(0, 3) && f.is_here(0, 1) && f.is_here(1, 2));
    assert(f.counters.n_miss == 3 && f.counters.n_loads == 3 && f.counters.n_evictions == 1);
    assert((f.run(0, { 1, 2 }) == std::vector<int32_t>{ 1, 0 })); // what the layer uses itself does not leave
    assert(f.counters.n_hit == 1);
    assert((f.run(1, { 0, 1, 2 }) == std::vector<int32_t>{ 0, 1, -1 })); // no third slot: the host computes it
    f.cache.check();
}

// a layer needs no expert that it leaves out: it is not copied, and takes nobody's place
static void test_what_is_left_out_is_not_copied() {
    for (const char * policy : { "lru+fetch", "lru+balance", "lru+host-admit" }) {
        fixture f(4, policy);
        f.cache.begin_forward();
        f.run(0, { 3, 1 }, { 0, 0 });
        assert(f.counters.n_loads == 0 && !f.is_here(0, 3) && !f.is_here(0, 1));
    }
    fixture f(1, "lru+fetch");
    f.cache.begin_forward();
    assert((f.run(0, { 3, 1 }, { 0, 2 }) == std::vector<int32_t>{ -1, 0 }));
    assert((f.run(1, { 2 }, { 0 }) == std::vector<int32_t>{ -1 }) && f.is_here(0, 1));
}

static void test_nobody_leaves() {
    fixture f(1, "lfu+fetch", false);
    f.cache.begin_forward();
    assert((f.run(0, { 3, 1 }) == std::vector<int32_t>{ 0, -1 }));
    assert((f.run(1, { 2 }) == std::vector<int32_t>{ -1 }));
    assert(f.counters.n_evictions == 0);
}

static void test_balance() {
    assert(spac_demand_loads::n_copied(5, 10, 10) == 2); // 20 beside 30
    assert(spac_demand_loads::n_copied(4, 1, 3) == 3);   // 3 beside 3
    assert(spac_demand_loads::n_copied(4, 100, 1) == 0);
    assert(spac_demand_loads::n_copied(4, 1, 100) == 4);
    assert(spac_demand_loads::n_copied(4, 0, 0) == 0); // nothing is known: the host's time first
    assert(spac_demand_loads::n_copied(4, 0, 5) == 4); // then the link's
    assert(spac_demand_loads::n_copied(0, 1, 1) == 0);

    fixture f(4, "lru+balance");
    f.cache.begin_forward();
    assert((f.run(0, { 0, 1 }) == std::vector<int32_t>{ -1, -1 }));
    assert((f.run(1, { 0, 1 }, {}, 10) == std::vector<int32_t>{ 0, 1 }));        // a copy took 10
    assert((f.run(0, { 2, 3 }, { 1, 2 }, 10) == std::vector<int32_t>{ -1, 2 })); // one each: the busier one comes
}

static void test_host_admit() {
    fixture f(2, "lru+host-admit");
    f.cache.begin_forward();
    assert((f.run(0, { 0, 1, 2 }, { 1, 3, 2 }) == std::vector<int32_t>{ -1, -1, -1 }));
    assert(!f.is_here(0, 0) && f.is_here(0, 1) && f.is_here(0, 2)); // the two that are used most
    assert((f.run(0, { 1, 3 }) == std::vector<int32_t>{ 0, -1 }));
    assert(f.is_here(0, 1) && f.is_here(0, 3) && !f.is_here(0, 2));
    f.cache.check();
}

static void test_names() {
    for (const std::string & eviction : spac_eviction::names()) {
        assert(spac_baseline("p", eviction + "+fetch").eviction == eviction);
    }
    assert(!spac_baseline("p", "").is_on());
    assert(spac_baseline("p", "ema+fetch").is_scheduled() && !spac_baseline("p", "lru+fetch").is_scheduled());
    const spac_baseline own("p", "lru+balance+per-layer");
    assert(own.eviction == "lru" && own.miss == spac_baseline::BALANCE && own.per_layer && !spac_baseline("p", "lru+balance").per_layer);
    for (const char * text : { "lru", "lru+", "+fetch", "lru+host", "lru+fetch+fetch", "LRU+fetch", "lru + fetch", "ema+host-admit", "belady+fetch",
                               "least-stale:cyclic=2+fetch", "lru+per-layer", "+per-layer", "lru+per-layer+fetch", "lru+fetch+per-layer+per-layer", "lru+fetch+per-layers" }) {
        bool refused = false;
        try {
            spac_baseline("p", text);
        } catch (const spac_error & e) {
            refused = e.status == SPAC_STATUS_INVALID_ARGUMENT;
        }
        if (!refused) {
            printf("\"%s\" was taken\n", text);
        }
        assert(refused);
    }
}

int main() {
    test_fetch();
    test_what_is_left_out_is_not_copied();
    test_nobody_leaves();
    test_balance();
    test_host_admit();
    test_names();
    return 0;
}
