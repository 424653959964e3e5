// Which experts a device holds, behind one mutex: what the scheduler decides, what the graph looks up, and which load comes
// next. Who is in which slot is slot-table.h's; each kind of load has a file of its own (load.h).
#pragma once

#include "ahead-loads.h"
#include "byte-budget.h"
#include "fill-loads.h"
#include "slot-table.h"
#include "wanted-loads.h"

#include "spac.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

struct spac_expert_cache {
    using layer_desc = spac_slot_table::layer_desc;
    using published  = spac_slot_table::published;

    spac_expert_cache(std::vector<layer_desc> layers, const std::vector<int32_t> & group_slots, uint32_t n_expert, bool evict, const published & out);

    spac_expert_cache(const spac_expert_cache &) = delete;

    // scheduler's side

    // takes over utilities [n_layer, n_expert], thresholds [n_layer] and loads; what waits moves to its new level
    void apply(const uint8_t * utility, const uint8_t * tau, const uint32_t * load, size_t n_load, uint64_t byte_budget);
    void cancel(); // drops waiting loads

    // graph's side

    // slots of the n distinct experts of a layer (-1: not resident); resident ones are pinned
    // n_rows: activations of each, for the counters
    void pin(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots);
    void unpin_all();
    // renews the byte budget; unpins what was pinned before the previous forward: the device may still be busy with that
    void begin_forward();
    void idle(); // no forward began for a while: renews the byte budget too

    // n experts that were just used, n_rows times each: those absent are copied into free slots, outside the byte budget, while
    // no load that the scheduler asked for can start, without evicting
    // n_tokens: of a prompt: what most of them used comes first; 0: what has the highest utility, as for all from the next
    // decision on
    // n_held_max: of the layer's experts that hold or await a slot
    void fill(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, size_t n_tokens, size_t n_held_max);

    // all that a layer of a step asks, at once: unpins (unless `keeps_pins`), pins, and fills with the first n_fill experts
    void run_layer(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots, bool keeps_pins, size_t n_fill);

    // the slot of one of the running layer's experts that it did not ask for, pinned; -1: it is not resident
    int32_t pin_other(uint32_t il, int32_t ie);

    // of predictors, on any thread

    // the forward in which a layer runs next, and whether it has run there by now
    uint64_t forward_of(uint32_t il);
    bool     has_run(uint32_t il, uint64_t forward);

    // Experts that a layer is expected to use, most wanted first: until it has run their slots are not taken, and those absent
    // are copied before all else, as far as that is sure to delay nothing: they have to be on the device when the layer runs,
    // behind what is in flight, what the scheduler asked for and what was expected before, at the speed of the copies so far;
    // and the byte budget has to have room for them beside the scheduler's loads. What is still waiting when the layer runs
    // is dropped. Returns how many of them are absent; expectations that come too late are ignored
    size_t expect(const spac_expectation & what, const std::vector<int32_t> & experts);
    double copy_us(uint32_t il); // of one expert of a layer, as measured; 0: not known

    // worker's side

    enum class wait_result { LOAD,
                             IDLE,
                             STOPPED };
    wait_result wait_for_load(spac_load & load); // blocks; IDLE: nothing to load for IDLE_MS
    void        finish_load(const spac_load & load, bool ok, uint64_t us);
    void        stop();
    void        wait_stopped(uint64_t us); // until stop(), at most so long

    // true if no load can start and none is in flight
    bool    wait_idle(int32_t timeout_ms);
    int32_t slot_of(uint32_t il, uint32_t ie);
    void    check(); // throws if the books do not balance

    // of sources of loads, which the table knows; before the worker begins
    spac_slot_table  table;
    spac_byte_budget budget;

  private:
    static constexpr int IDLE_MS = 25;

    bool take(spac_load & load);
    bool is_idle() const;
    void look_up(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots);
    void renew_budget();

    std::mutex &            mutex; // the table's: guards all below
    spac_wanted_loads       wanted;
    spac_ahead_loads        ahead;
    spac_fill_loads         fills;
    std::condition_variable idle_now;
    uint64_t                idle_forward = 0; // forward at the last idle()
};
