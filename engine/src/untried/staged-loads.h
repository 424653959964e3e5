// Loads for prompts whose experts pass through the slots of a device, layer by layer: one layer is computed while the next
// one's experts are copied.
#pragma once

#include "cache/expert-cache.h"

#include <cstdint>
#include <deque>
#include <vector>

struct spac_staged_loads : spac_load_source {
    explicit spac_staged_loads(spac_expert_cache & cache); // which asks it from now on, and outlives it
    ~spac_staged_loads() override;

    // whether there are slots for two layers' experts
    bool can_stage();

    // n experts of a layer that comes soon, most wanted first: those absent are copied before all else, into slots that the
    // layers before have passed, else free ones, else those of the least useful experts; at most two layers' worth of slots
    // hold such experts at a time, so that the others stay
    void stage(uint32_t il, const int32_t * experts, size_t n);

    // waits until the n distinct experts that a layer uses are resident, and pins them; whatever else waits for the layer is
    // dropped. slots: -1 where the copy failed, or the cache was stopped
    void pin(uint32_t il, const int32_t * experts, size_t n, int32_t * slots);

    bool   take(spac_load & load) override;
    bool   is_idle() const override { return queue.empty(); }
    bool   keeps(uint32_t key, bool for_prompt) const override;
    size_t n_slots_needed(uint32_t il) const override;
    void   begin_forward() override;
    void   finished(const spac_load & load, bool ok, uint64_t us) override;

  private:
    struct passage {
        std::deque<int32_t> slots;     // with an owner that is, or was, here for a prompt; in that order
        size_t              n_max = 0; // two layers' experts
    };

    bool    is_passing(uint32_t il) const { return (int32_t) il == passing[0] || (int32_t) il == passing[1]; }
    int32_t take_slot(int32_t group);

    spac_slot_table &    table;
    std::vector<passage> passages;                // of each group
    std::deque<uint32_t> queue;                   // keys
    int32_t              passing[2] = { -1, -1 }; // layers whose experts are being staged or used
};
