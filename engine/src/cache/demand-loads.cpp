#include "demand-loads.h"

#include <algorithm>
#include <mutex>

spac_demand_loads::spac_demand_loads(spac_expert_cache & cache, const spac_baseline & baseline) :
    table(cache.table), cache(cache), baseline(baseline), eviction(baseline.eviction, cache.table) {
    table.sources[SPAC_LOADS_DEMAND] = this;
}

spac_demand_loads::~spac_demand_loads() {
    table.sources[SPAC_LOADS_DEMAND] = nullptr;
}

size_t spac_demand_loads::n_copied(size_t n, double copy_us, double host_us) {
    size_t best = 0;
    for (size_t i = 1; i <= n; i++) {
        const auto longer = [&](size_t k) { return std::max(k * copy_us, (n - k) * host_us); };
        best              = longer(i) < longer(best) ? i : best;
    }
    return best;
}

void spac_demand_loads::ask(uint32_t il, const int32_t * experts, const uint32_t * n_rows, const double * weights, size_t n, int32_t * slots, double host_us) {
    std::lock_guard<std::mutex> lock(table.mutex);
    eviction.use(il, experts, slots, weights, n);

    std::vector<size_t> busiest; // of those that are not there
    for (size_t i = 0; i < n; i++) {
        if (slots[i] < 0 && n_rows[i] > 0) {
            busiest.push_back(i);
        }
    }
    std::stable_sort(busiest.begin(), busiest.end(), [&](size_t a, size_t b) { return n_rows[a] > n_rows[b]; });
    if (baseline.miss == spac_baseline::HOST_ADMIT) {
        return admit(il, experts, busiest);
    }
    if (baseline.miss == spac_baseline::BALANCE) {
        const double us = copied_bytes > 0 ? (double) copy_us / copied_bytes * table.layers[il].expert_bytes : 0.0;
        busiest.resize(n_copied(busiest.size(), us, host_us));
    }
    std::vector<bool> is_wanted(n);
    for (size_t i : busiest) {
        is_wanted[i] = true;
    }
    claim(il, experts, n, is_wanted, slots);
}

// those of a layer in the order in which it asks for them, as the lab gives slots away
void spac_demand_loads::claim(uint32_t il, const int32_t * experts, size_t n, const std::vector<bool> & is_wanted, int32_t * slots) {
    std::vector<size_t> coming;
    for (size_t i = 0; i < n; i++) {
        const uint32_t key = il * table.n_expert + experts[i];
        if (is_wanted[i] && table.is_here(key)) { // on its way
            slots[i] = table.pin(key);
        } else if (is_wanted[i]) {
            coming.push_back(i);
        }
    }
    spac_slot_table::slot_group & group = table.group_of_layer(il);
    make_room(group, coming.size());
    for (size_t i : coming) {
        const int32_t index = table.take_free(group);
        if (index < 0) {
            break; // all others are in use: the host computes the rest
        }
        const uint32_t key = il * table.n_expert + experts[i];
        claimed.push_back(table.claim(key, index));
        slots[i] = table.pin(key);
    }
    table.work.notify_one();
}

void spac_demand_loads::make_room(spac_slot_table::slot_group & group, size_t n_slots) {
    if (n_slots <= group.free.size()) {
        return;
    }
    for (int32_t index : eviction.victims(group, n_slots - group.free.size())) {
        table.vacate(group, index);
        table.free_slot(group, index);
    }
}

// what still waits since the layer ran last is not worth waiting for
void spac_demand_loads::admit(uint32_t il, const int32_t * experts, const std::vector<size_t> & busiest) {
    const auto is_old = [&](uint32_t key) {
        const bool is_mine = table.layer_index(key) == il;
        if (is_mine) {
            table.give_up(key);
        }
        return is_mine;
    };
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_old), waiting.end());
    for (size_t i = 0; i < std::min(N_ADMITTED, busiest.size()); i++) {
        const uint32_t key = il * table.n_expert + experts[busiest[i]];
        if (table.state_of(key) == SPAC_RESIDENCY_ABSENT) {
            table.queue(key);
            waiting.push_back(key);
        }
    }
    table.work.notify_one();
}

void spac_demand_loads::wait(uint32_t il, const int32_t * experts, const int32_t * slots, size_t n) {
    std::unique_lock<std::mutex> lock(table.mutex);
    table.arrived.wait(lock, [&] {
        for (size_t i = 0; i < n && !table.stopped; i++) {
            if (slots[i] >= 0 && !table.is_resident(il * table.n_expert + experts[i])) {
                return false;
            }
        }
        return true;
    });
}

// ---- the worker's side

bool spac_demand_loads::take(spac_load & load) {
    if (!claimed.empty()) {
        load = claimed.front();
        claimed.pop_front();
        return true;
    }
    while (!waiting.empty()) {
        const uint32_t key = waiting.front();
        waiting.pop_front();
        spac_slot_table::slot_group & group = table.group_of(key);
        make_room(group, 1);
        const int32_t index = table.take_free(group);
        if (index >= 0) {
            load = table.claim(key, index);
            return true;
        }
        table.give_up(key);
    }
    return false;
}

void spac_demand_loads::finished(const spac_load & load, bool ok, uint64_t us) {
    copy_us += us;
    copied_bytes += load.bytes;
    if (ok) {
        eviction.come(load.il * table.n_expert + load.ie);
    }
}
