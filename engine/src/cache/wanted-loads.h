// What the scheduler asks for: the most useful first, as the byte budget allows, in place of what is less useful.
#pragma once

#include "byte-budget.h"
#include "prefetch-queue.h"
#include "slot-table.h"

struct spac_wanted_loads : spac_load_source {
    spac_wanted_loads(spac_slot_table & table, spac_byte_budget & budget) :
        table(table), budget(budget) {}

    // of a decision whose utilities the table has: what waits moves to its new level
    void   apply(const uint32_t * load, size_t n_load);
    void   cancel();
    size_t n_waiting() const { return queue.size(); }

    bool take(spac_load & load) override;
    bool is_idle() const override { return queue.empty() || out_of_credit; }
    void renewed() override { out_of_credit = false; }

  private:
    spac_slot_table &   table;
    spac_byte_budget &  budget;
    spac_prefetch_queue queue;
    bool                out_of_credit = false; // the head of the queue waits for the next forward
};
