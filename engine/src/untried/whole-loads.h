// Layers that a device has whole: which slots are theirs, and how they fill.
//
// The device has all experts of such a layer, in slots that follow each other, in the experts' order. They stay, so graphs
// compute the layer from there and ask nothing. Such a layer has a place, n_expert slots of its group, each reserved for one
// expert. It is taken from whoever is there, expert by expert, as the byte budget allows; meanwhile the layer is split. Once
// all are in place it is ready, and whole in the next graph that is built. A place is given back when the last graph with it
// is done.
#pragma once

#include "cache/expert-cache.h"

#include <atomic>
#include <cstdint>
#include <vector>

struct spac_whole_loads : spac_load_source {
    explicit spac_whole_loads(spac_expert_cache & cache); // which asks it from now on, and outlives it
    ~spac_whole_loads() override;

    // layers [n_layer] that shall be whole from now on; those that find no room, or cannot be, stay split
    void want(const uint8_t * wanted);
    // first slot [n_layer] of the layers that are whole in graphs built from now on; -1: split. Those that were wanted
    // together become so together: a change rebuilds the graph
    std::vector<int32_t> first_slots(uint64_t & version);
    uint64_t             version() const { return current_version; } // rises whenever that changes
    // a graph with these whole layers is about to be computed, and the last but one is done
    // may_reserve: no prompt's experts pass through the slots in it
    void enter_graph(const std::vector<int32_t> & whole, bool may_reserve);

    bool take(spac_load & load) override;
    bool is_idle() const override { return n_filling == 0 || waits; }
    void unpinned() override;
    void renewed() override { waits = false; }
    void finished(const spac_load & load, bool ok, uint64_t us) override;
    void check() const override;

  private:
    struct whole_layer {
        bool     is_wanted  = false;
        bool     is_failed  = false; // a copy for it failed: not again
        int32_t  place      = -1;    // in its group; -1: it is split
        bool     is_ready   = false; // all experts are in place
        uint64_t last_graph = 0;     // in which it was whole
    };

    bool    take_for(uint32_t il, spac_load & load);
    bool    can_be_emptied(const spac_slot_table::slot & s) const;
    int32_t first_slot(uint32_t il) const;
    void    reserve(uint32_t il);
    void    release(uint32_t il);
    void    agree();
    void    publish(uint32_t il, spac_layer_mode mode);

    spac_slot_table &              table;
    spac_byte_budget &             budget;
    std::vector<std::vector<bool>> is_taken;      // of each group: places, one after the other from slot 0 on
    std::vector<whole_layer>       layers;        // [n_layer]
    std::vector<int32_t>           agreed;        // first_slots()
    size_t                         n_filling = 0; // layers with a place that are not ready
    uint64_t                       n_graphs  = 0;
    bool                           waits     = false; // what they still need cannot be copied now
    std::atomic<uint64_t>          current_version{ 1 };
    std::atomic<bool>              any{ false }; // wanted, or with a place
};
