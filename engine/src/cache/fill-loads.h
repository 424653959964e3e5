// What was just used and is absent: copied into free slots, outside the byte budget, while no load that the scheduler asked
// for can start, without evicting.
#pragma once

#include "prefetch-queue.h"
#include "slot-table.h"

#include <vector>

struct spac_fill_loads : spac_load_source {
    explicit spac_fill_loads(spac_slot_table & table) :
        table(table), n_spoken_for(table.groups.size(), 0) {}

    // as spac_expert_cache::fill()
    void add(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, size_t n_tokens, size_t n_held_max);
    void apply(); // a decision's utilities, which know more than the batch that a load comes from
    void cancel();

    bool take(spac_load & load) override;
    bool is_idle() const override { return queue.empty(); }

  private:
    bool   is_passing(uint32_t key) const;
    size_t n_free(uint32_t il) const;
    size_t n_held(uint32_t il) const;

    spac_slot_table &   table;
    spac_prefetch_queue queue;        // level: utility, or the share of a prompt's tokens that used it
    std::vector<size_t> n_spoken_for; // free slots of each group
};
