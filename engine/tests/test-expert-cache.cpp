#include "cache/prefetch-worker.h"
#include "check.h"
#include <ctime>
#include <thread>

// loads all that can start, in order; returns their keys
static std::vector<uint32_t> run_loads(cache_fixture & f) {
    std::vector<uint32_t> keys;
    {
        spac_prefetch_worker worker(f.cache, [&](const spac_load & load) {
            keys.push_back(f.key(load.il, load.ie));
            return true; }, 0);
        CHECK(f.cache.wait_idle(5000));
    }
    return keys;
}

// brings one expert to the device, in so much time
static void run_copy(cache_fixture & f, uint32_t key, uint64_t us) {
    const std::vector<uint8_t> utility = f.utility;
    f.utility[key]                     = 255;
    f.apply({ key });
    spac_load load;
    CHECK(f.cache.wait_for_load(load) == spac_expert_cache::wait_result::LOAD && f.key(load.il, load.ie) == key);
    f.cache.finish_load(load, true, us);
    f.utility = utility;
    f.apply({});
}

// as run_loads, and more may follow
static std::vector<uint32_t> take_loads(cache_fixture & f) {
    std::vector<uint32_t> keys;
    for (spac_load load; f.cache.wait_for_load(load) == spac_expert_cache::wait_result::LOAD;) {
        f.cache.finish_load(load, true, 10);
        keys.push_back(f.key(load.il, load.ie));
    }
    return keys;
}

// 1 layer, 4 experts, 2 slots; utilities 1 3 2 0, tau 1. Loads 0 1 2 are submitted in this order.
// By utility: 1 (free slot), 2 (free slot), then 0: no slot left, and nothing below it to evict: dropped.
static void test_by_hand() {
    cache_fixture f(1, 4, 2);
    f.utility = { 1, 3, 2, 0 };
    f.apply({ 0, 1, 2 });
    CHECK((run_loads(f) == std::vector<uint32_t>{ 1, 2 }));
    CHECK((f.residency == std::vector<uint8_t>{ SPAC_RESIDENCY_ABSENT, SPAC_RESIDENCY_RESIDENT, SPAC_RESIDENCY_RESIDENT, SPAC_RESIDENCY_ABSENT }));
    CHECK(f.counters.n_loads == 2 && f.counters.loaded_bytes == 200 && f.counters.n_evictions == 0);

    CHECK(f.pin(0, 1) >= 0 && f.pin(0, 0) == -1);
    CHECK(f.counters.n_hit == 1 && f.counters.n_miss == 1 && f.counters.n_late == 0);
    f.cache.check();
}

// what was just used takes free slots, the most used first, so many of a layer at most, and evicts nothing
static void test_fill() {
    cache_fixture  f(2, 4, 3);
    const int32_t  first[] = { 0, 1, 3 }, second[] = { 2, 0 };
    const uint32_t rows[] = { 1, 2, 3 };
    f.cache.fill(0, first, rows, 3, 4, 2);  // 3 and 1
    f.cache.fill(0, first, rows, 3, 4, 2);  // the layer has its share
    f.cache.fill(1, second, rows, 2, 4, 2); // one slot is left: 0, used as often as 1
    CHECK((run_loads(f) == std::vector<uint32_t>{ 3, 1, 4 + 0 }));
    f.cache.fill(1, second, rows, 2, 4, 4); // none is free
    CHECK(f.residency[4 + 2] == SPAC_RESIDENCY_ABSENT && f.counters.n_evictions == 0 && f.counters.n_loads == 3);
    f.cache.check();
}

// a decision knows more than the batch that they come from
static void test_fills_move_to_their_utility() {
    cache_fixture  f(1, 6, 3);
    const int32_t  used[] = { 0, 1, 2 };
    const uint32_t rows[] = { 3, 2, 1 };
    f.cache.fill(0, used, rows, 3, 4, 6);
    f.utility = { 1, 3, 2, 0, 0, 0 };
    f.apply({});
    CHECK((run_loads(f) == std::vector<uint32_t>{ 1, 2, 0 }));
    f.cache.check();

    cache_fixture g(2, 6, 4); // what the next forward uses does not go before those
    g.utility[1] = 1;
    g.cache.fill(0, used, rows, 2, 4, 6);
    g.apply({});
    g.cache.fill(1, used, rows, 2, 0, 6);
    CHECK((run_loads(g) == std::vector<uint32_t>{ 1, 0, 6 + 0, 6 + 1 }));
    g.cache.check();
}

// what the scheduler asks for comes first, and its byte budget is not theirs
static void test_fill_waits_for_loads() {
    const int32_t  used[] = { 0, 1, 2 };
    const uint32_t rows[] = { 1, 1, 1 };
    cache_fixture  f(1, 6, 3);
    f.cache.fill(0, used, rows, 3, 1, 6);
    f.utility = { 0, 0, 0, 1, 2, 0 };
    f.apply({ 3, 4 });
    CHECK((run_loads(f) == std::vector<uint32_t>{ 4, 3, 0 }));
    CHECK(f.residency[1] == SPAC_RESIDENCY_ABSENT && f.residency[2] == SPAC_RESIDENCY_ABSENT);
    f.cache.check();

    cache_fixture g(1, 6, 3);
    g.utility = { 0, 0, 0, 1, 2, 0 };
    g.apply({ 3, 4 }, 100); // one load per forward
    g.cache.fill(0, used, rows, 3, 1, 6);
    CHECK((run_loads(g) == std::vector<uint32_t>{ 4, 0, 1 }));
    g.cache.check();

    cache_fixture h(1, 6, 3);
    h.cache.fill(0, used, rows, 3, 1, 6);
    h.cache.cancel();
    CHECK(h.residency[0] == SPAC_RESIDENCY_ABSENT && run_loads(h).empty());
    h.cache.check();
}

// a layer of a step: the layer before is unpinned, residents are pinned, the first ones that are absent fill
static void test_layer_at_once() {
    cache_fixture f(2, 3, 4);
    f.utility[0] = 1;
    f.apply({ 0 });
    run_loads(f);
    const spac_slot_table::slot_group & group   = f.cache.table.groups[0];
    const int32_t                       first[] = { 0, 1 }, second[] = { 1, 2 };
    const uint32_t                      rows[] = { 1, 2 };
    int32_t                             slots[2];
    f.cache.run_layer(0, first, rows, 2, slots, true, 1); // of these the first is here
    CHECK(slots[0] >= 0 && slots[1] == -1 && group.slots[slots[0]].n_pins == 1);
    CHECK(f.counters.n_hit == 1 && f.counters.n_miss == 1 && f.counters.n_miss_rows == 2 && f.residency[1] == SPAC_RESIDENCY_ABSENT);

    const int32_t pinned = slots[0];
    f.cache.run_layer(0, first, rows, 1, slots, true, 0); // a forward's first layer: the one before is still in use
    CHECK(group.slots[pinned].n_pins == 2);
    f.cache.run_layer(1, second, rows, 2, slots, false, 1);
    CHECK(group.slots[pinned].n_pins == 0 && f.residency[3 + 1] == SPAC_RESIDENCY_QUEUED && f.residency[3 + 2] == SPAC_RESIDENCY_ABSENT);
    f.cache.check();
}

// what a worker would do with all loads that can start now; keys in their order
static std::vector<uint32_t> work_off(cache_fixture & f) {
    std::vector<uint32_t> keys;
    for (spac_load load; f.cache.wait_for_load(load) == spac_expert_cache::wait_result::LOAD;) {
        keys.push_back(f.key(load.il, load.ie));
        f.cache.finish_load(load, true, 10);
    }
    f.cache.check();
    return keys;
}

static std::vector<int32_t> pin_staged(cache_fixture & f, uint32_t il, const std::vector<int32_t> & used) {
    std::vector<int32_t> slots(used.size());
    f.staged.pin(il, used.data(), used.size(), slots.data());
    return slots;
}

// 3 layers of 3 experts in 7 slots, of which 6 may be passed through; layer 0's expert 1 is resident and wanted, and stays
static void test_stage_by_hand() {
    cache_fixture f(3, 3, 7);
    f.utility[1] = 9;
    f.apply({ 1 });
    work_off(f);
    CHECK(f.staged.can_stage() && !cache_fixture(3, 3, 5).staged.can_stage() && !cache_fixture(3, 3, 9, false).staged.can_stage());

    const int32_t all[] = { 2, 0, 1 };
    f.staged.stage(0, all, 3);
    f.staged.stage(1, all, 3);
    CHECK((work_off(f) == std::vector<uint32_t>{ 2, 0, 3 + 2, 3 + 0, 3 + 1 }) && f.counters.n_staged == 5 && f.counters.staged_bytes == 500);
    const std::vector<int32_t> first = pin_staged(f, 0, { 0, 1 });
    CHECK(first[0] >= 0 && first[1] >= 0 && first[0] != first[1]);

    f.cache.unpin_all();
    f.staged.stage(1, all, 3);
    f.staged.stage(2, all, 3); // the seventh slot, and those of layer 0's passers
    CHECK((work_off(f) == std::vector<uint32_t>{ 6 + 2, 6 + 0, 6 + 1 }));
    CHECK(f.residency[1] == SPAC_RESIDENCY_RESIDENT && f.residency[0] == SPAC_RESIDENCY_ABSENT && f.residency[2] == SPAC_RESIDENCY_ABSENT);
    CHECK(pin_staged(f, 1, { 0, 1, 2 }).size() == 3);

    f.cache.unpin_all();
    CHECK(pin_staged(f, 2, { 1 })[0] >= 0);
    f.cache.begin_forward(); // decoding: free again, but for what may still be in use
    CHECK(f.residency[6 + 1] == SPAC_RESIDENCY_RESIDENT && f.residency[6 + 2] == SPAC_RESIDENCY_ABSENT && f.residency[3] == SPAC_RESIDENCY_ABSENT);
    f.cache.begin_forward();
    CHECK(f.residency[6 + 1] == SPAC_RESIDENCY_ABSENT && f.residency[1] == SPAC_RESIDENCY_RESIDENT);
    f.cache.check();
}

// what a layer turns out not to use is not copied
static void test_stage_drops_what_is_not_used() {
    cache_fixture f(2, 4, 8);
    const int32_t all[] = { 0, 1, 2, 3 };
    f.staged.stage(0, all, 1);
    CHECK((work_off(f) == std::vector<uint32_t>{ 0 }));
    f.staged.stage(0, all, 4);
    spac_load load;
    CHECK(f.cache.wait_for_load(load) == spac_expert_cache::wait_result::LOAD && load.ie == 1 && load.is_staged);
    CHECK(pin_staged(f, 0, { 0 })[0] >= 0);
    f.cache.finish_load(load, true, 10);
    CHECK(work_off(f).empty() && f.residency[1] == SPAC_RESIDENCY_RESIDENT && f.residency[2] == SPAC_RESIDENCY_ABSENT);
}

// with a full pool the least useful leave, wanted or not; never those of the two layers on the way
static void test_stage_takes_the_least_useful() {
    cache_fixture f(3, 2, 4);
    f.utility = { 0, 0, 0, 0, 7, 9 };
    f.apply({ 4, 5 });
    work_off(f);
    f.utility = { 5, 6, 0, 0, 7, 9 };
    f.apply({ 0, 1 });
    CHECK(work_off(f).size() == 2); // all four are wanted
    const int32_t all[] = { 0, 1 };
    f.staged.stage(0, all, 2);
    f.staged.stage(1, all, 2);
    CHECK((work_off(f) == std::vector<uint32_t>{ 2, 3 }));
    CHECK(f.residency[0] == SPAC_RESIDENCY_RESIDENT && f.residency[1] == SPAC_RESIDENCY_RESIDENT && f.residency[5] == SPAC_RESIDENCY_ABSENT);
    CHECK(pin_staged(f, 0, { 0, 1 })[0] >= 0 && f.counters.n_pinned_steals == 0);
}

// nor for what a decision asks for meanwhile, though they are worth less: the graph was told that they are here
static void test_stage_keeps_what_is_here() {
    cache_fixture f(3, 2, 4);
    f.utility = { 1, 1, 9, 9, 0, 0 };
    f.apply({ 0, 1, 2, 3 });
    CHECK(work_off(f).size() == 4);
    const int32_t all[] = { 0, 1 };
    f.staged.stage(0, all, 2);
    CHECK(work_off(f).empty());
    f.utility = { 0, 0, 9, 9, 9, 9 };
    f.apply({ 4, 5 });
    CHECK(work_off(f).empty());
    const auto slots = pin_staged(f, 0, { 0, 1 });
    CHECK(slots[0] >= 0 && slots[1] >= 0);
}

// a prompt's most used experts stay where they passed, without another copy, as long as free slots are left for the rest
static void test_passers_fill_free_slots() {
    cache_fixture  f(4, 2, 6);
    const int32_t  all[]  = { 0, 1 };
    const uint32_t rows[] = { 1, 3 };
    f.staged.stage(0, all, 2);
    f.staged.stage(1, all, 2);
    work_off(f);
    pin_staged(f, 0, { 0, 1 });
    f.cache.fill(0, all, rows, 2, 4, 2); // 2 slots are free, none of them needed by those that pass
    CHECK(work_off(f).empty());
    f.cache.unpin_all();
    f.staged.stage(2, all, 2);
    work_off(f);
    f.staged.stage(3, all, 2);
    work_off(f);
    CHECK(f.residency[1] == SPAC_RESIDENCY_RESIDENT && f.residency[0] == SPAC_RESIDENCY_RESIDENT); // both stayed
    CHECK(f.residency[2] == SPAC_RESIDENCY_ABSENT && f.counters.n_loads == 8);
}

// nothing waits for ever: not for a copy that failed, not when all ends
static void test_stage_ends() {
    cache_fixture f(1, 2, 4);
    const int32_t all[] = { 0, 1 };
    f.staged.stage(0, all, 2);
    {
        spac_prefetch_worker worker(f.cache, [&](const spac_load & load) { return load.ie == 1; }, 0);
        const auto           slots = pin_staged(f, 0, { 0, 1 });
        CHECK(slots[0] == -1 && slots[1] >= 0 && f.counters.n_load_failures == 1);
    }
    f.cache.check();

    cache_fixture g(1, 2, 4);
    g.staged.stage(0, all, 2);
    std::thread stopper([&] { g.cache.stop(); });
    CHECK(pin_staged(g, 0, { 0, 1 })[0] == -1);
    stopper.join();
}

// time until the layer runs: of so many copies
static spac_expectation expects(cache_fixture & f, uint32_t il, double time_us = 1e9) {
    return { SPAC_AHEAD_NEXT_LAYER, il, f.cache.forward_of(il), time_us, true };
}

// what is expected goes before all that the scheduler asked for, and falls back when its layer runs
static void test_expected_goes_first() {
    cache_fixture f(2, 4, 4);
    f.cache.begin_forward();
    run_copy(f, 3, 10); // 10 us for each copy
    f.utility = { 1, 2, 0, 1, 1, 1, 0, 0 };
    f.apply({ 1, 4 + 0 });
    CHECK(f.cache.expect(expects(f, 1), { 1, 0 }) == 2);
    f.cache.pin(0, nullptr, nullptr, 0, nullptr);
    CHECK((take_loads(f) == std::vector<uint32_t>{ 4 + 1, 4 + 0, 1 }));
    CHECK(f.ahead[0].n_queued == 2 && f.ahead[0].n_copied == 2 && f.ahead[0].n_cut == 0 && f.ahead[0].n_dropped == 0);
    CHECK(f.pin(1, 1) >= 0 && f.pin(1, 1) >= 0 && f.ahead[0].n_used == 1);
    CHECK(f.ahead[0].n_predicted == 2 && f.ahead[0].n_chosen == 1 && f.ahead[0].n_hit == 1);
    f.cache.check();

    cache_fixture g(2, 4, 4);
    g.cache.begin_forward();
    run_copy(g, 3, 10);
    g.utility = { 1, 0, 0, 1, 1, 0, 0, 0 };
    g.apply({ 0, 4 + 0 });
    CHECK(g.cache.expect(expects(g, 1), { 0, 1 }) == 2);
    const spac_expectation late = expects(g, 1);
    CHECK(!g.cache.has_run(1, late.forward));
    g.cache.pin(1, nullptr, nullptr, 0, nullptr); // now
    CHECK(g.cache.has_run(1, late.forward) && g.cache.forward_of(1) == late.forward + 1);
    CHECK(g.ahead[0].n_dropped == 2 && g.cache.expect(late, { 2 }) == 0);
    CHECK((take_loads(g) == std::vector<uint32_t>{ 0, 4 + 0 }) && g.residency[4 + 1] == SPAC_RESIDENCY_ABSENT);
    g.cache.check();
}

// as many as are there in time, behind what comes first, and as the byte budget has room for beside the scheduler's loads
static void test_expected_in_time() {
    cache_fixture f(2, 6, 6);
    f.cache.begin_forward();
    CHECK(f.cache.expect(expects(f, 1, 1000), { 0, 1, 2 }) == 3); // no copy was measured yet: one
    CHECK(f.ahead[0].n_queued == 1 && f.ahead[0].n_cut == 2);
    f.cache.cancel();
    f.cache.begin_forward();
    run_copy(f, 5, 10);
    CHECK(f.cache.expect(expects(f, 1, 35), { 1, 2, 3, 4 }) == 4); // three take 30 us
    CHECK(f.ahead[0].n_queued == 4 && f.ahead[0].n_cut == 3);
    CHECK(f.cache.expect(expects(f, 1, 45), { 1, 2, 0, 5 }) == 2); // three wait: one more
    CHECK(f.ahead[0].n_queued == 5 && f.ahead[0].n_cut == 4);
    CHECK(f.cache.expect(expects(f, 1, 45), { 4, 5 }) == 0 && f.ahead[0].n_cut == 4); // another token's, told once
    f.cache.cancel();
    f.cache.begin_forward();
    f.utility = { 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0 };
    f.apply({ 0, 1 });
    CHECK(f.cache.expect(expects(f, 1, 35), { 0, 1, 2 }) == 3); // two that the scheduler asked for
    CHECK(f.ahead[0].n_queued == 6 && f.ahead[0].n_cut == 6);
    f.cache.cancel();
    f.apply({ 0 }, 150);
    f.cache.begin_forward();
    CHECK(f.cache.expect(expects(f, 1), { 0, 1, 2 }) == 3); // 250 bytes with what was saved up, of which 100 are spoken for
    CHECK(f.ahead[0].n_queued == 7 && f.ahead[0].n_cut == 8);
    CHECK((take_loads(f) == std::vector<uint32_t>{ 6 + 0, 0 }));
    CHECK(f.cache.expect({ SPAC_AHEAD_NEXT_LAYER, 1, f.cache.forward_of(1), 1e9, false }, { 3 }) == 1 && f.ahead[0].n_queued == 7);
    f.cache.check();
}

// the slots of what is expected are not taken until its layer has run; and nothing that is wanted leaves for what is used once
static void test_expected_stays() {
    cache_fixture f(2, 4, 1);
    f.cache.begin_forward();
    run_copy(f, 4 + 1, 10);
    CHECK(f.cache.expect(expects(f, 1), { 1 }) == 0);
    f.utility = { 5, 0, 0, 0, 0, 0, 0, 0 };
    f.apply({ 0 });
    CHECK(take_loads(f).empty() && f.cache.slot_of(1, 1) == 0);

    cache_fixture g(2, 4, 1);
    g.cache.begin_forward();
    run_copy(g, 4 + 1, 10);
    CHECK(g.cache.expect({ SPAC_AHEAD_DRAFT_GATE, 1, g.cache.forward_of(1) + 1, 1e9, true }, { 1, 2 }) == 1); // 2 finds no slot
    g.utility = { 5, 0, 0, 0, 0, 0, 0, 0 };
    g.apply({ 0 });
    CHECK(take_loads(g).empty() && g.ahead[1].n_dropped == 1);

    cache_fixture h(2, 4, 1);
    h.cache.begin_forward();
    run_copy(h, 0, 10);
    h.utility = { 5, 0, 0, 0, 0, 0, 0, 0 };
    h.apply({});
    CHECK(h.cache.expect(expects(h, 1), { 1 }) == 1);
    CHECK(take_loads(h).empty() && h.ahead[0].n_dropped == 1);

    h.cache.begin_forward();
    h.tau = { 6, 6 };
    h.apply({});
    CHECK(h.cache.expect(expects(h, 1), { 1 }) == 1);
    CHECK((take_loads(h) == std::vector<uint32_t>{ 4 + 1 }));
    h.cache.pin(1, nullptr, nullptr, 0, nullptr);
    h.utility[2] = 7;
    h.apply({ 2 });
    CHECK((take_loads(h) == std::vector<uint32_t>{ 2 }) && h.ahead[0].n_wasted == 1 && h.ahead[0].n_used == 0);
    h.cache.check();
}

// a full pool gives up its lowest utility below tau, never one that is wanted
static void test_eviction() {
    cache_fixture g(1, 5, 2);
    g.utility = { 2, 3, 0, 0, 0 };
    g.apply({ 0, 1 });
    std::vector<uint32_t> order;
    spac_prefetch_worker  worker(g.cache, [&](const spac_load & load) {
        order.push_back(load.ie);
        return true; }, 0);
    CHECK(g.cache.wait_idle(5000));

    // expert 0 fell to 1, expert 1 to 0; tau 2: both may go, expert 1 first
    g.utility = { 1, 0, 4, 0, 0 };
    g.tau     = { 2 };
    g.apply({ 2 });
    CHECK(g.cache.wait_idle(5000));
    CHECK((order == std::vector<uint32_t>{ 1, 0, 2 }));
    CHECK(g.residency[1] == SPAC_RESIDENCY_ABSENT && g.residency[0] == SPAC_RESIDENCY_RESIDENT);
    CHECK(g.counters.n_evictions == 1);

    // 3 is wanted as much as the residents 0 and 2, which are wanted too: nothing happens
    g.utility = { 3, 0, 3, 3, 0 };
    g.apply({ 3 });
    CHECK(g.cache.wait_idle(5000));
    CHECK(g.residency[3] == SPAC_RESIDENCY_ABSENT && g.counters.n_evictions == 1);
    g.cache.check();
}

static void test_pins_protect() {
    cache_fixture f(2, 3, 1);
    f.utility = { 1, 0, 0, 0, 0, 0 };
    f.apply({ 0 });
    spac_prefetch_worker worker(f.cache, [](const spac_load &) { return true; }, 0);
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.pin(0, 0) == 0);

    f.utility = { 0, 0, 0, 5, 0, 0 };
    f.apply({ f.key(1, 0) });
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.residency[f.key(1, 0)] == SPAC_RESIDENCY_ABSENT); // the only slot is in use
    CHECK(f.cache.slot_of(0, 0) == 0);

    f.cache.unpin_all();
    f.apply({ f.key(1, 0) });
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.cache.slot_of(1, 0) == 0 && f.cache.slot_of(0, 0) == -1);
    CHECK(f.counters.n_pinned_steals == 0);
}

// a pin outlives the next forward's beginning, as the device may lag behind, but not the one after
static void test_pins_of_the_forward_before() {
    cache_fixture f(1, 2, 1);
    f.utility = { 1, 0 };
    f.apply({ 0 });
    spac_prefetch_worker worker(f.cache, [](const spac_load &) { return true; }, 0);
    CHECK(f.cache.wait_idle(5000));
    f.cache.begin_forward();
    CHECK(f.pin(0, 0) == 0);
    f.utility = { 0, 5 };

    f.cache.begin_forward();
    f.apply({ 1 });
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.cache.slot_of(0, 0) == 0);

    f.cache.begin_forward();
    f.apply({ 1 });
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.cache.slot_of(0, 1) == 0);
}

static void test_no_evict() {
    cache_fixture f(1, 3, 1, false);
    f.utility = { 1, 0, 0 };
    f.apply({ 0 });
    spac_prefetch_worker worker(f.cache, [](const spac_load &) { return true; }, 0);
    CHECK(f.cache.wait_idle(5000));
    f.utility = { 0, 9, 0 };
    f.apply({ 1 });
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.cache.slot_of(0, 0) == 0 && f.counters.n_evictions == 0);
}

// 250 bytes per forward, 100 each: 2 at once, the other 2 in the next forward (50 are saved up)
static void test_byte_budget() {
    cache_fixture f(1, 8, 8);
    f.utility.assign(8, 1);
    f.apply({ 0, 1, 2, 3, 4 }, 250);
    spac_prefetch_worker worker(f.cache, [](const spac_load &) { return true; }, 0);
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.counters.n_loads == 2);
    f.cache.begin_forward();
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.counters.n_loads == 5); // 50 + 250 = 300
}

// a decision moves waiting loads to their new level, and drops what is no longer wanted
static void test_relevel() {
    cache_fixture f(1, 4, 4);
    f.utility = { 3, 2, 1, 0 };
    f.apply({ 0, 1, 2 });
    f.utility = { 1, 2, 3, 0 };
    f.tau     = { 2 };
    f.apply({});
    CHECK((run_loads(f) == std::vector<uint32_t>{ 2, 1 }));
    CHECK(f.residency[0] == SPAC_RESIDENCY_ABSENT);
}

static void test_garbage_is_ignored() {
    cache_fixture f(2, 3, 2);
    f.utility.assign(6, 7);
    f.apply({ 6, UINT32_MAX, 1, 1, 1 });
    CHECK((run_loads(f) == std::vector<uint32_t>{ 1 }));
}

// residency is on the board, where another process may write: decisions and look-ups go by the cache's own books
static void test_published_residency_is_never_read() {
    cache_fixture         f(1, 4, 2);
    std::vector<uint32_t> order;
    spac_prefetch_worker  worker(f.cache, [&](const spac_load & load) {
        order.push_back(load.ie);
        return true; }, 0);
    f.utility = { 3, 2, 0, 0 };
    f.apply({ 0, 1 });
    CHECK(f.cache.wait_idle(5000));

    f.residency.assign(4, SPAC_RESIDENCY_ABSENT);
    CHECK(f.pin(0, 0) >= 0);
    f.apply({ 0 }); // it has its slot
    CHECK(f.cache.wait_idle(5000));

    f.residency.assign(4, SPAC_RESIDENCY_RESIDENT);
    CHECK(f.pin(0, 2) == -1 && f.cache.slot_of(0, 3) == -1);
    CHECK(f.counters.n_hit == 1 && f.counters.n_miss == 1);
    f.cache.unpin_all();

    f.residency.assign(4, 0xff);
    f.utility = { 0, 0, 3, 2 };
    f.apply({ 2, 3 });
    CHECK(f.cache.wait_idle(5000));
    CHECK((order == std::vector<uint32_t>{ 0, 1, 2, 3 }));
    f.cache.check();
}

// a decision that wants more than fits, in a model of 60 x 384 experts: the graph asks for the same mutex
static void test_many_wishes() {
    constexpr uint32_t N_LAYER = 60, N_EXPERT = 384, N_SLOTS = 8000;

    cache_fixture f(N_LAYER, N_EXPERT, N_SLOTS);
    f.utility.assign(N_LAYER * N_EXPERT, 5);
    std::vector<uint32_t> held(N_SLOTS), others;
    for (uint32_t key = 0; key < N_LAYER * N_EXPERT; key++) {
        key < N_SLOTS ? (void) (held[key] = key) : others.push_back(key);
    }
    f.apply(held);
    spac_load load;
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        CHECK(f.cache.wait_for_load(load) == spac_expert_cache::wait_result::LOAD);
        f.cache.finish_load(load, true, 1);
    }

    std::fill_n(f.utility.begin(), N_SLOTS, 4); // less useful, but all of them are in use
    for (const uint32_t key : held) {
        CHECK(f.pin(key / N_EXPERT, key % N_EXPERT) >= 0);
    }
    f.apply(others);
    const clock_t start = clock(); // only of this process
    CHECK(f.cache.wait_for_load(load) == spac_expert_cache::wait_result::IDLE);
    const double ms = 1e3 * (clock() - start) / CLOCKS_PER_SEC;
    printf("%zu loads without a slot took %.1f ms\n", others.size(), ms);
    CHECK(ms < 60);
    f.cache.check();
}

static std::vector<int32_t> enter(cache_fixture & f) {
    uint64_t                   version;
    const std::vector<int32_t> whole = f.whole.first_slots(version);
    CHECK(version == f.whole.version());
    f.whole.enter_graph(whole, true);
    f.cache.begin_forward();
    return whole;
}

static void want(cache_fixture & f, const std::vector<uint8_t> & layers) {
    f.whole.want(layers.data());
}

// 3 layers of 2 experts in 5 slots: places for two layers, and one slot between all others
static void test_whole_by_hand() {
    cache_fixture f(3, 2, 5);
    f.utility = { 9, 9, 9, 9, 9, 0 };
    f.apply({ 0, 1, 2, 3, 4 });
    work_off(f); // slots 0 to 4, in this order
    const uint64_t version = f.whole.version();

    want(f, { 0, 1, 0 });
    CHECK(enter(f) == std::vector<int32_t>(3, -1));        // slots 0 and 1 are reserved for it
    CHECK((work_off(f) == std::vector<uint32_t>{ 2, 3 })); // they move there, whoever is wanted there
    CHECK(f.cache.slot_of(1, 0) == 0 && f.cache.slot_of(1, 1) == 1 && f.cache.slot_of(0, 0) < 0 && f.counters.n_evictions == 4);
    CHECK(f.whole.version() > version && (enter(f) == std::vector<int32_t>{ -1, 0, -1 }));

    f.apply({ 0, 1 }); // into the slots that it left, and no further
    CHECK((work_off(f) == std::vector<uint32_t>{ 0, 1 }));
    f.utility = { 9, 9, 0, 0, 9, 9 };
    f.tau     = { 1, 1, 1 };
    f.apply({ 5 });
    CHECK(work_off(f).empty() && f.cache.slot_of(1, 0) == 0); // worth nothing any more, and stays

    want(f, { 1, 0, 0 }); // in its place only once the others are done with theirs
    CHECK(enter(f) == std::vector<int32_t>(3, -1));
    CHECK((work_off(f) == std::vector<uint32_t>{ 0, 1 }) && f.cache.slot_of(0, 0) == 2);
    CHECK((enter(f) == std::vector<int32_t>{ 2, -1, -1 })); // the graph before the last had layer 1 whole
    f.apply({ 5 });
    CHECK((work_off(f) == std::vector<uint32_t>{ 5 }) && (f.cache.slot_of(1, 0) < 0) != (f.cache.slot_of(1, 1) < 0));
}

// of layers that are wanted together none is whole before the others; none within a budget of nothing, or where nothing leaves
static void test_whole_together() {
    cache_fixture f(2, 2, 4);
    f.apply({}, 100); // one expert per forward
    want(f, { 1, 1 });
    for (size_t n_loads = 0; n_loads < 4;) {
        CHECK(enter(f) == std::vector<int32_t>(2, -1));
        const size_t n = work_off(f).size();
        CHECK(n == 1 || (n == 2 && n_loads == 0)); // the first forward has what was left over
        n_loads += n;
    }
    CHECK((enter(f) == std::vector<int32_t>{ 0, 2 }));
    want(f, { 0, 0 }); // back again before the place was given up
    want(f, { 1, 1 });
    CHECK((enter(f) == std::vector<int32_t>{ 0, 2 }) && work_off(f).empty());

    for (const bool evict : { false, true }) {
        cache_fixture g(2, 2, 4, evict);
        g.apply({}, evict ? 0 : 1000);
        want(g, { 1, 1 });
        enter(g);
        enter(g);
        CHECK(work_off(g).empty());
    }
}

int main() {
    test_whole_by_hand();
    test_whole_together();
    test_many_wishes();
    test_by_hand();
    test_fill();
    test_fills_move_to_their_utility();
    test_fill_waits_for_loads();
    test_layer_at_once();
    test_stage_by_hand();
    test_stage_drops_what_is_not_used();
    test_stage_takes_the_least_useful();
    test_stage_keeps_what_is_here();
    test_passers_fill_free_slots();
    test_stage_ends();
    test_expected_goes_first();
    test_expected_in_time();
    test_expected_stays();
    test_eviction();
    test_pins_protect();
    test_pins_of_the_forward_before();
    test_no_evict();
    test_byte_budget();
    test_relevel();
    test_garbage_is_ignored();
    test_published_residency_is_never_read();
    return 0;
}
