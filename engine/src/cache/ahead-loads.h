// What predictors expect of a layer that has not run yet: who stays, and which copies go before all others.
#pragma once

#include "byte-budget.h"
#include "slot-table.h"
#include "wanted-loads.h"

#include <cstdint>
#include <deque>
#include <vector>

struct spac_expectation {
    int32_t  source; // spac_ahead_source
    uint32_t il;
    uint64_t forward;  // as forward_of() says
    double   time_us;  // until that layer runs
    bool     may_copy; // else what is resident stays, and no more
};

struct spac_ahead_loads : spac_load_source {
    spac_ahead_loads(spac_slot_table & table, spac_byte_budget & budget, const spac_wanted_loads & wanted) :
        table(table), budget(budget), wanted(wanted), predictions(SPAC_N_AHEAD * table.layers.size()) {}

    // as those of spac_expert_cache

    uint64_t forward_of(uint32_t il) const { return table.forward + ((int32_t) il <= last_il); }
    bool     has_run(uint32_t il, uint64_t forward) const { return forward < table.forward || (forward == table.forward && (int32_t) il <= last_il); }
    size_t   expect(const spac_expectation & what, const std::vector<int32_t> & experts);
    double   copy_us(uint32_t il) const { return us_per_byte * table.layers[il].expert_bytes; }

    void run(uint32_t il, const int32_t * experts, size_t n); // a layer runs now; its router chose these
    void cancel() { queue.clear(); }

    bool take(spac_load & load) override;
    bool is_idle() const override { return queue.empty(); }
    bool keeps(uint32_t key, bool for_prompt) const override;
    void begin_forward() override;
    void finished(const spac_load & load, bool ok, uint64_t us) override;

  private:
    struct awaited {
        uint32_t key;
        int32_t  source;
        uint64_t forward; // in which it is expected
    };
    // of one source and layer
    struct prediction {
        uint64_t          forward = 0; // 0: none yet
        std::vector<bool> is_expected; // [n_expert]
    };

    prediction &       prediction_of(uint32_t source, uint32_t il) { return predictions[source * table.layers.size() + il]; }
    const prediction & prediction_of(uint32_t source, uint32_t il) const { return predictions[source * table.layers.size() + il]; }

    template <typename is_over_t>
    void   drop(is_over_t is_over);
    double room(double time_us, uint64_t bytes) const;

    spac_slot_table &         table;
    spac_byte_budget &        budget;
    const spac_wanted_loads & wanted;
    std::vector<prediction>   predictions;             // [SPAC_N_AHEAD * n_layer]
    std::deque<awaited>       queue;                   // to be copied before all else
    int32_t                   last_il     = INT32_MAX; // of the layers that ran in this forward
    double                    us_per_byte = 0;         // of copies; 0: not known
};
