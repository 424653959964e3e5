// Which expert is in which slot: residency, pins, eviction and the queue of loads, behind one mutex.
//
//   ABSENT -> QUEUED -> LOADING -> RESIDENT -> ABSENT
//
// An expert becomes RESIDENT only after its copy has completed. A slot is taken from its owner only while nobody pins
// it, and before the copy begins, so a graph never sees a slot that is being written.
#pragma once

#include "prefetch-queue.h"
#include "spac.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

struct spac_load {
    uint32_t il;
    uint32_t ie;
    int32_t  slot;
    uint64_t bytes;
    int32_t  source    = -1;    // spac_ahead_source that predicted it; -1: none did
    bool     is_staged = false; // for a prompt
    int64_t  left      = -1;    // il * n_expert + ie of the expert that had the slot before; -1: none had
};

// what a predictor expects of a layer that has not run yet
struct spac_expectation {
    int32_t  source; // spac_ahead_source
    uint32_t il;
    uint64_t forward;  // as forward_of() says
    double   time_us;  // until that layer runs
    bool     may_copy; // else what is resident stays, and no more
};

struct spac_expert_cache {
    struct layer_desc {
        int32_t  group        = -1; // -1: not split
        uint32_t n_expert     = 0;
        uint64_t expert_bytes = 0;
        bool     can_be_whole = false;
    };

    // what the engine publishes, written here; never read back: another process may write there
    struct published {
        uint8_t *          residency; // [n_layer, n_expert]
        spac_counters *    counters;
        spac_ahead_stats * ahead = nullptr; // [SPAC_N_AHEAD]; NULL: nobody predicts
        uint8_t *          whole = nullptr; // [n_layer] spac_layer_mode, written of layers that can be whole; NULL: nobody asks

        // where each of several devices has a cache, and all write the same counters
        spac_device_stats * device = nullptr; // of its device; NULL: nobody asks
        std::mutex *        mutex  = nullptr; // that of all the caches; NULL: its own
    };

    spac_expert_cache(std::vector<layer_desc> layers, std::vector<int32_t> group_slots, uint32_t n_expert, bool evict, const published & out);

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
    // no load that the scheduler asked for can start; nobody is evicted for them
    // n_tokens: of a prompt: what most of them used comes first; 0: what has the highest utility, as for all from the next
    // decision on
    // n_held_max: of the layer's experts that hold or await a slot
    void fill(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, size_t n_tokens, size_t n_held_max);

    // of predictors, on any thread

    // the forward in which a layer runs next, and whether it has run there by now
    uint64_t forward_of(uint32_t il);
    bool     has_run(uint32_t il, uint64_t forward);

    // Experts that a layer is expected to use, most wanted first: until it has run nobody takes their slots, and those absent
    // are copied before all else, as far as that is sure to delay nothing: they have to be on the device when the layer runs,
    // behind what is in flight, what the scheduler asked for and what was expected before, at the speed of the copies so far;
    // and the byte budget has to have room for them beside the scheduler's loads. What is still waiting when the layer runs
    // is dropped. Returns how many of them are absent; expectations that come too late are ignored
    size_t expect(const spac_expectation & what, const std::vector<int32_t> & experts);
    double copy_us(uint32_t il); // of one expert of a layer, as measured; 0: not known

    // for prompts whose experts pass through the slots, layer by layer: expert-cache-stage.cpp

    // whether there are slots for two layers' experts
    bool can_stage();

    // n experts of a layer that comes soon, most wanted first: those absent are copied before all else, into slots that the
    // layers before have passed, else free ones, else those of the least useful experts; at most two layers' worth of slots
    // hold such experts at a time, so that the others stay
    void stage(uint32_t il, const int32_t * experts, size_t n);

    // waits until the n distinct experts that a layer uses are resident, and pins them; whatever else waits for the layer is
    // dropped. slots: -1 where the copy failed, or the cache was stopped
    void pin_staged(uint32_t il, const int32_t * experts, size_t n, int32_t * slots);

    // for layers that are whole: expert-cache-whole.cpp
    //
    // The device has all experts of such a layer, in slots that follow each other, in the experts' order. They stay, so graphs
    // compute the layer from there and ask nobody.

    // layers [n_layer] that shall be whole from now on; those that find no room, or cannot be, stay split
    void want_whole(const uint8_t * wanted);
    // first slot [n_layer] of the layers that are whole in graphs built from now on; -1: split. Those that were wanted
    // together become so together: a change rebuilds the graph
    std::vector<int32_t> whole_layers(uint64_t & version);
    uint64_t             whole_version() const { return version_of_whole; } // rises whenever that changes
    // a graph with these whole layers is about to be computed, and the last but one is done
    // may_reserve: no prompt's experts pass through the slots in it
    void enter_graph(const std::vector<int32_t> & whole, bool may_reserve);

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

  private:
    struct slot {
        uint32_t owner     = NONE; // key of the expert that is loading or resident
        uint32_t n_pins    = 0;
        uint64_t last_used = 0;     // forward
        int32_t  source    = -1;    // spac_ahead_source that brought the owner, which nobody has used yet; -1: none
        bool     is_staged = false; // the owner is here for a prompt
        uint32_t reserved  = NONE;  // for this key alone, whose layer is, or becomes, whole
    };
    struct awaited {
        uint32_t key;
        int32_t  source;
        uint64_t forward; // in which it is expected
    };
    struct slot_group {
        std::vector<slot>                 slots;
        std::vector<int32_t>              free;
        std::vector<std::vector<int32_t>> by_utility;       // resident slots per utility of their owner
        size_t                            n_fills = 0;      // free slots that are spoken for
        std::deque<int32_t>               staged;           // slots with an owner that is, or was, here for a prompt; in that order
        size_t                            n_staged     = 0; // of these: that are
        size_t                            n_staged_max = 0; // two layers' experts
        size_t                            n_reserved   = 0; // slots
        std::vector<bool>                 is_taken;         // places of whole layers, one after the other from slot 0 on
    };
    struct whole_layer {
        bool     is_wanted  = false;
        bool     is_failed  = false; // a copy for it failed: not again
        int32_t  place      = -1;    // in its group; -1: it is split
        bool     is_ready   = false; // all experts are in place
        uint64_t last_graph = 0;     // in which it was whole
    };
    // of one source and layer
    struct prediction {
        uint64_t          forward = 0; // 0: none yet
        std::vector<bool> is_expected; // [n_expert]
    };
    struct pinned {
        int32_t  group, slot;
        uint64_t forward;
    };

    static constexpr uint32_t NONE    = UINT32_MAX;
    static constexpr int      IDLE_MS = 25;

    const layer_desc & layer_of(uint32_t key) const { return layers[key / n_expert]; }

    void      set_state(uint32_t key, spac_residency new_state);
    void      renew_credit();
    void      unpin_before(uint64_t first_kept);
    bool      take_next(spac_load & load);
    bool      take_wanted(spac_load & load);
    bool      take_fill(spac_load & load);
    bool      take_ahead(spac_load & load);
    bool      take_staged(spac_load & load);
    bool      take_whole(spac_load & load);
    bool      take_for_whole(uint32_t il, spac_load & load);
    bool      can_be_emptied(const slot & s) const;
    int32_t   first_slot(uint32_t il) const;
    void      reserve(uint32_t il);
    void      release(uint32_t il);
    void      agree_on_whole();
    void      publish_whole(uint32_t il, spac_layer_mode mode);
    void      free_slot(slot_group & group, int32_t index);
    int32_t   take_stage_slot(slot_group & group);
    bool      is_passing(uint32_t il) const;
    void      set_staged(slot & s, bool is_staged);
    size_t    n_to_stage(uint32_t il) const;
    void      release_staged();
    void      vacate(slot_group & group, int32_t index);
    void      vacate(slot_group & group, int32_t index, std::vector<int32_t>::const_iterator at); // in the order by utility
    bool      is_expected(uint32_t key) const;
    bool      is_over(uint32_t il, uint64_t forward) const;
    void      note_outcome(uint32_t il, const int32_t * experts, size_t n);
    void      drop_ahead(uint32_t il);
    double    room_for_ahead(double time_us, uint64_t bytes) const;
    void      drop_fills();
    spac_load claim(uint32_t key, int32_t slot);
    int32_t   take_slot(slot_group & group, int n_levels);
    int32_t   take_victim(slot_group & group, int n_levels, bool for_prompt = false);
    bool      is_wanted(uint32_t key) const;
    bool      is_waiting(uint32_t key) const;
    void      give_up(uint32_t key);
    bool      has_credit(uint64_t bytes) const;
    void      rebuild_order();

    const std::vector<layer_desc> layers;
    const uint32_t                n_expert;
    const bool                    evict;
    const published               out;

    std::mutex              own_mutex;
    std::mutex &            mutex; // guards all below, and what is published
    std::condition_variable work;  // a load may be startable, or stop
    std::condition_variable idle_now;
    std::vector<slot_group> groups;
    std::vector<uint8_t>    state;      // [n_layer * n_expert] spac_residency
    std::vector<int32_t>    slot_index; // [n_layer * n_expert] slot while loading or resident, else -1
    std::vector<uint8_t>    utility;    // [n_layer * n_expert]
    std::vector<uint8_t>    tau;        // [n_layer]
    std::vector<pinned>     pins;
    spac_prefetch_queue     queue;
    spac_prefetch_queue     fills;                      // for free slots; level: utility, or the share of a prompt's tokens that used it
    std::vector<prediction> predictions;                // [SPAC_N_AHEAD * n_layer]
    std::deque<awaited>     ahead;                      // expected, and to be copied before all else
    std::deque<uint32_t>    to_stage;                   // keys to be copied for a prompt
    int32_t                 passing[2] = { -1, -1 };    // layers whose experts are being staged or used by it
    std::condition_variable staged;                     // a copy for a prompt is done, or stop
    int32_t                 last_il       = INT32_MAX;  // of the layers that ran in this forward
    double                  us_per_byte   = 0;          // of copies; 0: not known
    uint64_t                forward       = 1;          // the first, or the next one
    uint64_t                idle_forward  = 0;          // forward at the last idle()
    uint64_t                byte_budget   = UINT64_MAX; // per forward
    uint64_t                credit        = UINT64_MAX; // bytes that may still start in this forward
    uint32_t                n_loading     = 0;
    bool                    stopped       = false;
    uint64_t                n_graphs      = 0;
    bool                    out_of_credit = false; // the head of the queue waits for the next forward
    bool                    whole_waits   = false; // what whole layers still need cannot be copied now

    std::vector<whole_layer> whole;         // [n_layer]
    std::vector<int32_t>     agreed;        // whole_layers()
    size_t                   n_filling = 0; // layers with a place that are not ready
    std::atomic<uint64_t>    version_of_whole{ 1 };
    std::atomic<bool>        any_whole{ false }; // wanted, or with a place
};
