// Which expert is in which slot of a device: states, pins, and who has to leave.
//
//   ABSENT -> QUEUED -> LOADING -> RESIDENT -> ABSENT
//
//   queue    ABSENT -> QUEUED              arrive  LOADING -> RESIDENT
//   give_up  QUEUED -> ABSENT              fail    LOADING -> ABSENT
//   claim    ABSENT, QUEUED -> LOADING     vacate  RESIDENT -> ABSENT
//
// An expert becomes RESIDENT only after its copy has completed. A slot is taken from its owner only while it is not pinned, and
// before the copy begins, so a graph never sees a slot that is being written.
#pragma once

#include "load.h"
#include "prefetch-queue.h"
#include "spac.h"

#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

struct spac_slot_table {
    static constexpr uint32_t NONE     = UINT32_MAX;
    static constexpr int      N_LEVELS = spac_prefetch_queue::N_LEVELS; // of utility

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
        spac_ahead_stats * ahead = nullptr; // [SPAC_N_AHEAD]; NULL: there is no predictor
        uint8_t *          whole = nullptr; // [n_layer] spac_layer_mode, written of layers that can be whole; NULL: not needed

        // where each of several devices has a cache, and all write the same counters
        spac_device_stats * device = nullptr; // of its device; NULL: not needed
        std::mutex *        mutex  = nullptr; // that of all the caches; NULL: its own
    };

    struct slot {
        uint32_t owner     = NONE; // key of the expert that is loading or resident
        uint32_t n_pins    = 0;
        uint64_t last_used = 0;     // forward
        int32_t  source    = -1;    // spac_ahead_source that brought the owner, which was not used yet; -1: none
        bool     is_staged = false; // the owner is here for a prompt
        uint32_t reserved  = NONE;  // only for this key, whose layer is, or becomes, whole
    };

    struct slot_group {
        std::vector<slot>                 slots;
        std::vector<int32_t>              free;
        std::vector<std::vector<int32_t>> by_utility;     // resident slots per utility of their owner
        size_t                            n_staged   = 0; // slots
        size_t                            n_reserved = 0;
    };

    spac_slot_table(std::vector<layer_desc> layers, const std::vector<int32_t> & group_slots, uint32_t n_expert, bool evict, const published & out);

    // ---- experts; key: il * n_expert + ie

    uint32_t           layer_index(uint32_t key) const { return key / n_expert; }
    const layer_desc & layer_of(uint32_t key) const { return layers[layer_index(key)]; }
    slot_group &       group_of(uint32_t key) { return groups[layer_of(key).group]; }
    slot_group &       group_of_layer(uint32_t il) { return groups[layers[il].group]; }

    spac_residency state_of(uint32_t key) const { return (spac_residency) state[key]; }
    bool           is_resident(uint32_t key) const { return state[key] == SPAC_RESIDENCY_RESIDENT; }
    bool           is_here(uint32_t key) const { return is_resident(key) || state[key] == SPAC_RESIDENCY_LOADING; }
    bool           is_wanted(uint32_t key) const { return utility[key] >= tau[layer_index(key)]; }
    int32_t        slot_of(uint32_t key) const { return slot_index[key]; } // while loading or resident, else -1

    // one that waits may be taken out of turn, as it is expected: its place in a queue is worth nothing then
    bool is_waiting(uint32_t key) const { return state[key] == SPAC_RESIDENCY_QUEUED; }

    // ---- from state to state

    void      queue(uint32_t key) { set_state(key, SPAC_RESIDENCY_QUEUED); }
    void      give_up(uint32_t key); // if it waits
    spac_load claim(uint32_t key, int32_t index);
    void      arrive(const spac_load & load);
    void      fail(const spac_load & load);
    void      vacate(slot_group & group, int32_t index); // its owner leaves, and is named as such until another one comes; O(slots of its level)

    // ---- slots for those that come: an index, no more free than anybody's, or -1

    // a free one, else a victim's
    int32_t take_slot(slot_group & group, int n_levels);
    // the least useful resident's slot below a level that is not in use and may go; ties: the one used longest ago
    // for_prompt: one that is wanted or expected may go as well
    int32_t take_victim(slot_group & group, int n_levels, bool for_prompt = false);
    int32_t take_free(slot_group & group);

    bool is_kept(uint32_t key, bool for_prompt) const; // by a source of loads
    void free_slot(slot_group & group, int32_t index); // it has no owner any more; one that is reserved waits for its expert
    void set_staged(slot_group & group, slot & s, bool is_staged);

    // an expert each from slot `first` on, for a layer that is, or becomes, whole; until then their owners stay
    void reserve(uint32_t il, int32_t first);
    void release(uint32_t il, int32_t first);

    // ---- pins

    int32_t pin(uint32_t key);                 // of a resident one: its slot
    void    unpin_before(uint64_t first_kept); // forward

    // ---- a decision

    void set_utilities(const uint8_t * utility, const uint8_t * tau);

    void check() const; // throws if the books do not balance

    const std::vector<layer_desc> layers;
    const uint32_t                n_expert;
    const bool                    evict;
    const published               out;

    std::mutex              own_mutex; // used where none is given
    std::mutex &            mutex;     // guards all below, and what is published
    std::condition_variable work;      // a load may be startable, or stop
    std::condition_variable arrived;   // a copy is done, or failed, or stop

    std::array<spac_load_source *, SPAC_N_LOADS> sources = {}; // NULL: none of this kind

    std::vector<slot_group> groups;
    std::vector<uint8_t>    utility;       // [n_layer * n_expert]
    uint64_t                forward   = 1; // the first, or the next one
    uint32_t                n_loading = 0;
    bool                    stopped   = false;

  private:
    struct pinned {
        int32_t  group, slot;
        uint64_t forward;
    };

    void set_state(uint32_t key, spac_residency new_state);
    void vacate(slot_group & group, int32_t index, std::vector<int32_t>::const_iterator at); // in the order by utility
    void rebuild_order();

    std::vector<uint8_t> state;      // [n_layer * n_expert] spac_residency
    std::vector<int32_t> slot_index; // [n_layer * n_expert]
    std::vector<uint8_t> tau;        // [n_layer]
    std::vector<pinned>  pins;
};
