// What a layer that runs asks for and does not find on its device, where a policy to compare with says so (baseline.h): copied while
// the layer waits, or for the next time.
#pragma once

#include "baseline.h"
#include "eviction.h"
#include "expert-cache.h"

#include <cstdint>
#include <deque>
#include <vector>

struct spac_demand_loads : spac_load_source {
    spac_demand_loads(spac_expert_cache & cache, const spac_baseline & baseline); // before the worker begins
    ~spac_demand_loads() override;

    bool wants_weights() const { return eviction.wants_weights(); }

    // Of a layer that runs: experts that it does not find (slots[i] < 0) get a slot, which is pinned, as far as the policy has them
    // copied now. n_rows: activations of each that need it (0: it is not copied); weights: as of spac_eviction::use
    // host_us: an expert on the host, as measured; 0: not known
    void ask(uint32_t il, const int32_t * experts, const uint32_t * n_rows, const double * weights, size_t n, int32_t * slots, double host_us);
    void wait(uint32_t il, const int32_t * experts, const int32_t * slots, size_t n); // until all that have a slot are there

    // how many of n experts are best copied, so that both sides end together: the fewest of equals
    static size_t n_copied(size_t n, double copy_us, double host_us);

    bool take(spac_load & load) override;
    bool is_idle() const override { return claimed.empty() && waiting.empty(); }
    void finished(const spac_load & load, bool ok, uint64_t us) override;

  private:
    static constexpr size_t N_ADMITTED = 2; // of a layer's call, for the next time: caches that admit freely thrash (as the lab's)

    void claim(uint32_t il, const int32_t * experts, size_t n, const std::vector<bool> & is_wanted, int32_t * slots);
    void admit(uint32_t il, const int32_t * experts, const std::vector<size_t> & busiest);
    void make_room(spac_slot_table::slot_group & group, size_t n_slots);

    spac_slot_table &     table;
    spac_expert_cache &   cache;
    const spac_baseline   baseline;
    spac_eviction         eviction;
    std::deque<spac_load> claimed; // their layer waits
    std::deque<uint32_t>  waiting; // keys, for the next time
    uint64_t              copy_us = 0, copied_bytes = 0;
};
