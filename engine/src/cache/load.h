// One copy of an expert to the device, and who may ask for one.
#pragma once

#include <cstddef>
#include <cstdint>

struct spac_load {
    uint32_t il;
    uint32_t ie;
    int32_t  slot;
    uint64_t bytes;
    int32_t  source    = -1;    // spac_ahead_source that predicted it; -1: none did
    bool     is_staged = false; // for a prompt
    int64_t  left      = -1;    // il * n_expert + ie of the expert that had the slot before; -1: none had
};

// Who wants experts on the device: one kind of load. All of its functions are called with the slot table's mutex held.
struct spac_load_source {
    virtual ~spac_load_source() = default;

    // claims a slot for the next of its loads; false: none can start now
    virtual bool take(spac_load & load) = 0;
    // whether none of its loads waits, or none can start before the next forward
    virtual bool is_idle() const = 0;

    // whether this expert's slot may not be taken; for_prompt: for one that passes through the slots
    virtual bool keeps(uint32_t /*key*/, bool /*for_prompt*/) const { return false; }

    // free slots of a layer's group that it will take soon
    virtual size_t n_slots_needed(uint32_t /*il*/) const { return 0; }

    virtual void begin_forward() {}

    virtual void unpinned() {} // slots that the graph used

    virtual void renewed() {} // the byte budget

    virtual void finished(const spac_load & /*load*/, bool /*ok*/, uint64_t /*us*/) {} // whoever's load it was

    virtual void check() const {} // throws if its books do not balance
};

// in this order they are asked for the next load
enum spac_load_order {
    SPAC_LOADS_STAGED, // for a prompt
    SPAC_LOADS_DEMAND, // what a layer that runs did not find, where a policy to compare with says so
    SPAC_LOADS_AHEAD,  // what predictors expect
    SPAC_LOADS_WHOLE,  // of layers that are to be whole
    SPAC_LOADS_WANTED, // what the scheduler asks for
    SPAC_LOADS_FILL,   // what was just used, into free slots
    SPAC_N_LOADS,
};
