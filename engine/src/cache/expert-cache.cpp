#include "expert-cache.h"

#include <algorithm>
#include <chrono>

spac_expert_cache::spac_expert_cache(std::vector<layer_desc> layers, const std::vector<int32_t> & group_slots, uint32_t n_expert, bool evict,
                                     const published & out) :
    table(std::move(layers), group_slots, n_expert, evict, out),
    mutex(table.mutex), wanted(table, budget), ahead(table, budget, wanted), fills(table) {
    table.sources[SPAC_LOADS_WANTED] = &wanted;
    table.sources[SPAC_LOADS_AHEAD]  = &ahead;
    table.sources[SPAC_LOADS_FILL]   = &fills;
}

// ---- scheduler's side

void spac_expert_cache::apply(const uint8_t * utility, const uint8_t * tau, const uint32_t * load, size_t n_load, uint64_t byte_budget) {
    std::lock_guard<std::mutex> lock(mutex);
    table.set_utilities(utility, tau);
    budget.set(byte_budget);
    wanted.apply(load, n_load);
    fills.apply();
    table.work.notify_one();
}

void spac_expert_cache::cancel() {
    std::lock_guard<std::mutex> lock(mutex);
    wanted.cancel();
    ahead.cancel();
    fills.cancel();
    idle_now.notify_all();
}

// ---- graph's side

void spac_expert_cache::fill(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, size_t n_tokens, size_t n_held_max) {
    std::lock_guard<std::mutex> lock(mutex);
    fills.add(il, experts, n_rows, n, n_tokens, n_held_max);
}

void spac_expert_cache::pin(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots) {
    std::lock_guard<std::mutex> lock(mutex);
    look_up(il, experts, n_rows, n, slots);
}

void spac_expert_cache::look_up(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots) {
    spac_counters & c = *table.out.counters;
    ahead.run(il, experts, n);
    for (size_t i = 0; i < n; i++) {
        const uint32_t key = il * table.n_expert + experts[i];
        slots[i]           = -1;
        switch (table.state_of(key)) {
            case SPAC_RESIDENCY_RESIDENT:
                {
                    slots[i]                  = table.pin(key);
                    spac_slot_table::slot & s = table.group_of(key).slots[slots[i]];
                    if (s.source >= 0) {
                        table.out.ahead[s.source].n_used++;
                        s.source = -1;
                    }
                    c.n_hit++;
                    c.n_hit_rows += n_rows[i];
                }
                break;
            case SPAC_RESIDENCY_LOADING:
                c.n_late++;
                c.n_late_rows += n_rows[i];
                break;
            default:
                c.n_miss++;
                c.n_miss_rows += n_rows[i];
                break;
        }
    }
}

int32_t spac_expert_cache::pin_other(uint32_t il, int32_t ie) {
    std::lock_guard<std::mutex> lock(mutex);
    const uint32_t              key = il * table.n_expert + ie;
    return table.is_resident(key) ? table.pin(key) : -1;
}

void spac_expert_cache::run_layer(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots, bool keeps_pins, size_t n_fill) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!keeps_pins) {
        table.unpin_before(UINT64_MAX);
    }
    look_up(il, experts, n_rows, n, slots);
    if (n_fill > 0) {
        fills.add(il, experts, n_rows, n_fill, 0, SIZE_MAX);
    }
}

void spac_expert_cache::unpin_all() {
    std::lock_guard<std::mutex> lock(mutex);
    table.unpin_before(UINT64_MAX);
}

void spac_expert_cache::begin_forward() {
    std::lock_guard<std::mutex> lock(mutex);
    table.forward++;
    table.unpin_before(table.forward - 1);
    for (spac_load_source * source : table.sources) {
        if (source) {
            source->begin_forward();
        }
    }
    renew_budget();
}

void spac_expert_cache::idle() {
    std::lock_guard<std::mutex> lock(mutex);
    if (table.forward == idle_forward) {
        renew_budget();
    }
    idle_forward = table.forward;
}

void spac_expert_cache::renew_budget() {
    uint64_t largest = 0;
    for (const layer_desc & layer : table.layers) {
        largest = std::max(largest, layer.expert_bytes);
    }
    budget.renew(largest);
    for (spac_load_source * source : table.sources) {
        if (source) {
            source->renewed();
        }
    }
    table.work.notify_one();
}

// ---- of predictors

uint64_t spac_expert_cache::forward_of(uint32_t il) {
    std::lock_guard<std::mutex> lock(mutex);
    return ahead.forward_of(il);
}

bool spac_expert_cache::has_run(uint32_t il, uint64_t forward) {
    std::lock_guard<std::mutex> lock(mutex);
    return ahead.has_run(il, forward);
}

size_t spac_expert_cache::expect(const spac_expectation & what, const std::vector<int32_t> & experts) {
    std::lock_guard<std::mutex> lock(mutex);
    return ahead.expect(what, experts);
}

double spac_expert_cache::copy_us(uint32_t il) {
    std::lock_guard<std::mutex> lock(mutex);
    return ahead.copy_us(il);
}

// ---- worker's side

// claims a slot for the best waiting load; false if none can start now
bool spac_expert_cache::take(spac_load & load) {
    return std::any_of(table.sources.begin(), table.sources.end(), [&](spac_load_source * source) { return source && source->take(load); });
}

spac_expert_cache::wait_result spac_expert_cache::wait_for_load(spac_load & load) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!table.stopped) {
        if (take(load)) {
            return wait_result::LOAD;
        }
        idle_now.notify_all();
        if (table.work.wait_for(lock, std::chrono::milliseconds(IDLE_MS)) == std::cv_status::timeout) {
            return wait_result::IDLE;
        }
    }
    return wait_result::STOPPED;
}

void spac_expert_cache::finish_load(const spac_load & load, bool ok, uint64_t us) {
    std::lock_guard<std::mutex> lock(mutex);
    spac_counters &             c = *table.out.counters;
    c.load_us += us;
    c.n_loads += ok;
    c.n_load_failures += !ok;
    c.loaded_bytes += ok ? load.bytes : 0;
    if (spac_device_stats * device = table.out.device) {
        device->load_us += us;
        device->n_loads += ok;
        device->n_load_failures += !ok;
        device->loaded_bytes += ok ? load.bytes : 0;
    }
    if (ok) {
        table.arrive(load);
    } else {
        table.fail(load);
    }
    for (spac_load_source * source : table.sources) {
        if (source) {
            source->finished(load, ok, us);
        }
    }
}

void spac_expert_cache::stop() {
    std::lock_guard<std::mutex> lock(mutex);
    table.stopped = true;
    table.arrived.notify_all();
    table.work.notify_all();
    idle_now.notify_all();
}

void spac_expert_cache::wait_stopped(uint64_t us) {
    std::unique_lock<std::mutex> lock(mutex);
    table.work.wait_for(lock, std::chrono::microseconds(us), [&] { return table.stopped; });
}

bool spac_expert_cache::is_idle() const {
    return table.n_loading == 0 &&
           std::all_of(table.sources.begin(), table.sources.end(), [](const spac_load_source * source) { return !source || source->is_idle(); });
}

bool spac_expert_cache::wait_idle(int32_t timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex);
    return idle_now.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return table.stopped || is_idle(); });
}

int32_t spac_expert_cache::slot_of(uint32_t il, uint32_t ie) {
    std::lock_guard<std::mutex> lock(mutex);
    const uint32_t              key = il * table.n_expert + ie;
    return table.is_resident(key) ? table.slot_of(key) : -1;
}

void spac_expert_cache::check() {
    std::lock_guard<std::mutex> lock(mutex);
    table.check();
}
