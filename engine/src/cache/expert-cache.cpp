#include "expert-cache.h"

#include "base/average.h"
#include "base/status.h"

#include <algorithm>
#include <chrono>

static constexpr double SPEED_WEIGHT = 0.1; // of the latest copy in the measured speed

spac_expert_cache::spac_expert_cache(std::vector<layer_desc> layers, std::vector<int32_t> group_slots, uint32_t n_expert, bool evict, const published & out) :
    layers(std::move(layers)), n_expert(n_expert), evict(evict), out(out), mutex(out.mutex ? *out.mutex : own_mutex), groups(group_slots.size()),
    state(this->layers.size() * n_expert, SPAC_RESIDENCY_ABSENT), slot_index(this->layers.size() * n_expert, -1), utility(this->layers.size() * n_expert, 0), tau(this->layers.size(), 1), predictions(SPAC_N_AHEAD * this->layers.size()), whole(this->layers.size()),
    agreed(this->layers.size(), -1) {
    for (size_t i = 0; i < groups.size(); i++) {
        groups[i].slots.resize(group_slots[i]);
        groups[i].by_utility.resize(spac_prefetch_queue::N_LEVELS);
        for (int32_t s = group_slots[i] - 1; s >= 0; s--) {
            groups[i].free.push_back(s);
        }
    }
    for (const layer_desc & layer : this->layers) {
        if (layer.group >= 0) {
            groups[layer.group].n_staged_max = std::max<size_t>(groups[layer.group].n_staged_max, 2 * layer.n_expert);
            groups[layer.group].is_taken.resize(group_slots[layer.group] / std::max<size_t>(1, layer.n_expert));
        }
    }
}

void spac_expert_cache::set_state(uint32_t key, spac_residency new_state) {
    state[key]         = new_state;
    out.residency[key] = new_state;
}

bool spac_expert_cache::is_wanted(uint32_t key) const {
    return utility[key] >= tau[key / n_expert];
}

// one that waits may be taken out of turn, as it is expected: its place in a queue is worth nothing then
bool spac_expert_cache::is_waiting(uint32_t key) const {
    return state[key] == SPAC_RESIDENCY_QUEUED;
}

void spac_expert_cache::give_up(uint32_t key) {
    if (is_waiting(key)) {
        set_state(key, SPAC_RESIDENCY_ABSENT);
    }
}

// O(slots): the order is by utility, and a decision changes all utilities at once
void spac_expert_cache::rebuild_order() {
    for (slot_group & group : groups) {
        for (auto & level : group.by_utility) {
            level.clear();
        }
        for (size_t s = 0; s < group.slots.size(); s++) {
            const uint32_t owner = group.slots[s].owner;
            if (owner != NONE && state[owner] == SPAC_RESIDENCY_RESIDENT) {
                group.by_utility[utility[owner]].push_back((int32_t) s);
            }
        }
    }
}

void spac_expert_cache::apply(const uint8_t * new_utility, const uint8_t * new_tau, const uint32_t * load, size_t n_load, uint64_t budget) {
    std::lock_guard<std::mutex> lock(mutex);

    std::copy_n(new_utility, utility.size(), utility.begin());
    std::copy_n(new_tau, tau.size(), tau.begin());
    byte_budget = budget;
    if (budget == UINT64_MAX) {
        credit = UINT64_MAX;
    } else if (credit == UINT64_MAX) {
        credit = budget;
    }
    rebuild_order();

    for (uint32_t key : queue.drain()) {
        if (!is_waiting(key)) {
            continue;
        }
        if (is_wanted(key)) {
            queue.push(key, utility[key]);
        } else {
            set_state(key, SPAC_RESIDENCY_ABSENT);
        }
    }
    for (size_t i = 0; i < n_load; i++) {
        const uint32_t key   = load[i];
        const bool     valid = key < utility.size() && layer_of(key).group >= 0 && key % n_expert < layer_of(key).n_expert;
        if (valid && state[key] == SPAC_RESIDENCY_ABSENT && is_wanted(key)) {
            set_state(key, SPAC_RESIDENCY_QUEUED);
            queue.push(key, utility[key]);
        }
    }
    // utilities know more than the batch that a fill comes from
    for (uint32_t key : fills.drain()) {
        fills.push(key, utility[key]);
    }
    out_of_credit = false;
    work.notify_one();
}

void spac_expert_cache::cancel() {
    std::lock_guard<std::mutex> lock(mutex);
    for (uint32_t key : queue.drain()) {
        give_up(key);
    }
    ahead.clear();
    drop_fills();
    idle_now.notify_all();
}

void spac_expert_cache::drop_fills() {
    for (uint32_t key : fills.drain()) {
        give_up(key);
    }
    for (slot_group & group : groups) {
        group.n_fills = 0;
    }
}

void spac_expert_cache::fill(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, size_t n_tokens, size_t n_held_max) {
    std::lock_guard<std::mutex> lock(mutex);

    slot_group & group   = groups[layers[il].group];
    const size_t n_taken = group.n_fills + (passing[1] < 0 ? 0 : n_to_stage(il)); // of the free slots
    if (group.free.size() <= n_taken) {
        return;
    }
    const auto is_passer = [&](uint32_t key) { return state[key] == SPAC_RESIDENCY_RESIDENT && group.slots[slot_index[key]].is_staged; };
    size_t     n_held    = 0;
    for (uint32_t key = il * n_expert; key < (il + 1) * n_expert; key++) {
        n_held += state[key] != SPAC_RESIDENCY_ABSENT && !is_passer(key);
    }
    const size_t room = std::min(group.free.size() - n_taken, n_held_max - std::min(n_held_max, n_held));

    std::vector<size_t> absent;
    for (size_t i = 0; i < n; i++) {
        const uint32_t key = il * n_expert + experts[i];
        if (state[key] == SPAC_RESIDENCY_ABSENT || is_passer(key)) {
            absent.push_back(i);
        }
    }
    std::stable_sort(absent.begin(), absent.end(), [&](size_t a, size_t b) { return n_rows[a] > n_rows[b]; });
    for (size_t i = 0; i < std::min(absent.size(), room); i++) {
        const uint32_t key = il * n_expert + experts[absent[i]];
        if (is_passer(key)) {
            set_staged(group.slots[slot_index[key]], false); // it stays, and the layers behind pass through another slot
            continue;
        }
        set_state(key, SPAC_RESIDENCY_QUEUED);
        fills.push(key, n_tokens ? (uint8_t) std::min<uint64_t>(255, 255ull * n_rows[absent[i]] / n_tokens) : utility[key]);
        group.n_fills++;
    }
    work.notify_one();
}

void spac_expert_cache::pin(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots) {
    std::lock_guard<std::mutex> lock(mutex);

    note_outcome(il, experts, n);
    last_il = (int32_t) il;
    drop_ahead(il);
    const int32_t group = layers[il].group;
    for (size_t i = 0; i < n; i++) {
        const uint32_t key = il * n_expert + experts[i];
        slots[i]           = -1;
        switch (state[key]) {
            case SPAC_RESIDENCY_RESIDENT:
                {
                    slots[i] = slot_index[key];
                    slot & s = groups[group].slots[slots[i]];
                    s.n_pins++;
                    s.last_used = forward;
                    if (s.source >= 0) {
                        out.ahead[s.source].n_used++;
                        s.source = -1;
                    }
                    pins.push_back({ group, slots[i], forward });
                    out.counters->n_hit++;
                    out.counters->n_hit_rows += n_rows[i];
                }
                break;
            case SPAC_RESIDENCY_LOADING:
                out.counters->n_late++;
                out.counters->n_late_rows += n_rows[i];
                break;
            default:
                out.counters->n_miss++;
                out.counters->n_miss_rows += n_rows[i];
                break;
        }
    }
}

void spac_expert_cache::unpin_before(uint64_t first_kept) {
    size_t n_kept = 0;
    for (const pinned & p : pins) {
        if (p.forward < first_kept) {
            groups[p.group].slots[p.slot].n_pins--;
        } else {
            pins[n_kept++] = p;
        }
    }
    pins.resize(n_kept);
    if (n_filling > 0) { // their copies may have waited for these slots
        whole_waits = false;
        work.notify_one();
    }
}

void spac_expert_cache::unpin_all() {
    std::lock_guard<std::mutex> lock(mutex);
    unpin_before(UINT64_MAX);
}

void spac_expert_cache::begin_forward() {
    std::lock_guard<std::mutex> lock(mutex);
    forward++;
    last_il = -1;
    drop_ahead(NONE);
    unpin_before(forward - 1);
    release_staged();
    renew_credit();
}

void spac_expert_cache::idle() {
    std::lock_guard<std::mutex> lock(mutex);
    if (forward == idle_forward) {
        renew_credit();
    }
    idle_forward = forward;
}

void spac_expert_cache::renew_credit() {
    if (byte_budget != UINT64_MAX) {
        // what is left over may be saved up, so that an expert larger than the budget still loads now and then
        uint64_t largest = 0;
        for (const layer_desc & layer : layers) {
            largest = std::max(largest, layer.expert_bytes);
        }
        credit = std::min(credit + byte_budget, byte_budget + largest);
    }
    out_of_credit = whole_waits = false;
    work.notify_one();
}

bool spac_expert_cache::has_credit(uint64_t bytes) const {
    return credit == UINT64_MAX || credit >= bytes;
}

// the least useful resident slot below a level that is not in use and may go; ties: the one used longest ago
// none of the layers of a prompt that are being computed: it was found to be here; for_prompt: one that is wanted or expected
// may go as well
int32_t spac_expert_cache::take_victim(slot_group & group, int n_levels, bool for_prompt) {
    for (int level = 0; evict && level < n_levels; level++) {
        std::vector<int32_t> & resident = group.by_utility[level];

        int best = -1;
        for (size_t i = 0; i < resident.size(); i++) {
            const slot & s       = group.slots[resident[i]];
            const bool   is_kept = is_passing(s.owner / n_expert) || (!for_prompt && (is_wanted(s.owner) || is_expected(s.owner)));
            const bool   may_go  = s.n_pins == 0 && s.reserved == NONE && !is_kept;
            if (may_go && (best < 0 || s.last_used < group.slots[resident[best]].last_used)) {
                best = (int) i;
            }
        }
        if (best < 0) {
            continue;
        }
        const int32_t index = resident[best];
        vacate(group, index, resident.begin() + best);
        return index;
    }
    return -1;
}

// O(slots of its level)
void spac_expert_cache::vacate(slot_group & group, int32_t index) {
    const std::vector<int32_t> & resident = group.by_utility[utility[group.slots[index].owner]];
    vacate(group, index, std::find(resident.begin(), resident.end(), index));
}

// its owner leaves, and is named as such until another one comes
void spac_expert_cache::vacate(slot_group & group, int32_t index, std::vector<int32_t>::const_iterator at) {
    slot & s = group.slots[index];
    group.by_utility[utility[s.owner]].erase(at);
    set_staged(s, false);
    set_state(s.owner, SPAC_RESIDENCY_ABSENT);
    slot_index[s.owner] = -1;
    out.counters->n_evictions++;
    if (s.source >= 0) {
        out.ahead[s.source].n_wasted++;
    }
}

int32_t spac_expert_cache::take_slot(slot_group & group, int n_levels) {
    if (!group.free.empty()) {
        const int32_t index = group.free.back();
        group.free.pop_back();
        return index;
    }
    return take_victim(group, n_levels);
}

spac_load spac_expert_cache::claim(uint32_t key, int32_t index) {
    const layer_desc & layer = layer_of(key);
    slot &             s     = groups[layer.group].slots[index];
    if (s.n_pins > 0) {
        out.counters->n_pinned_steals++;
    }
    const int64_t left = s.owner == NONE ? -1 : (int64_t) s.owner;
    s.owner            = key;
    s.source           = -1;
    slot_index[key]    = index;
    set_state(key, SPAC_RESIDENCY_LOADING);
    n_loading++;
    spac_load load = { key / n_expert, key % n_expert, index, layer.expert_bytes };
    load.left      = left;
    return load;
}

// claims a slot for the best waiting load; false if none can start now
bool spac_expert_cache::take_next(spac_load & load) {
    return take_staged(load) || take_ahead(load) || take_whole(load) || take_wanted(load) || take_fill(load);
}

// of those that the scheduler asked for
// keys come most useful first: where one finds no victim, those after it find none either, and are not looked for
bool spac_expert_cache::take_wanted(spac_load & load) {
    out_of_credit = false;
    std::vector<bool> is_full(groups.size());
    for (uint32_t key; queue.pop(key);) {
        const layer_desc & layer = layer_of(key);
        if (!is_waiting(key)) {
            continue;
        }
        if (!is_wanted(key)) {
            set_state(key, SPAC_RESIDENCY_ABSENT);
            continue;
        }
        if (!has_credit(layer.expert_bytes)) {
            queue.push_front(key, utility[key]);
            out_of_credit = true;
            return false;
        }
        const int32_t index = is_full[layer.group] ? -1 : take_slot(groups[layer.group], utility[key]);
        if (index < 0) {
            is_full[layer.group] = true;
            set_state(key, SPAC_RESIDENCY_ABSENT); // nothing less useful to evict
            continue;
        }
        if (credit != UINT64_MAX) {
            credit -= layer.expert_bytes;
        }
        load = claim(key, index);
        return true;
    }
    return false;
}

// of those that were just used, while slots are free
bool spac_expert_cache::take_fill(spac_load & load) {
    for (uint32_t key; fills.pop(key);) {
        slot_group & group = groups[layer_of(key).group];
        group.n_fills--;
        if (!is_waiting(key)) {
            continue;
        }
        if (group.free.empty()) { // the scheduler's loads came first
            set_state(key, SPAC_RESIDENCY_ABSENT);
            continue;
        }
        load = claim(key, take_slot(group, 0));
        return true;
    }
    return false;
}

spac_expert_cache::wait_result spac_expert_cache::wait_for_load(spac_load & load) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopped) {
        if (take_next(load)) {
            return wait_result::LOAD;
        }
        idle_now.notify_all();
        if (work.wait_for(lock, std::chrono::milliseconds(IDLE_MS)) == std::cv_status::timeout) {
            return wait_result::IDLE;
        }
    }
    return wait_result::STOPPED;
}

void spac_expert_cache::finish_load(const spac_load & load, bool ok, uint64_t us) {
    std::lock_guard<std::mutex> lock(mutex);

    const uint32_t key   = load.il * n_expert + load.ie;
    slot_group &   group = groups[layers[load.il].group];
    n_loading--;
    out.counters->load_us += us;
    if (out.device) {
        out.device->load_us += us;
        out.device->n_loads += ok;
        out.device->n_load_failures += !ok;
        out.device->loaded_bytes += ok ? load.bytes : 0;
    }
    if (ok) {
        group.slots[load.slot].last_used = forward;
        group.by_utility[utility[key]].push_back(load.slot);
        out.counters->n_loads++;
        out.counters->loaded_bytes += load.bytes;
        spac_blend(us_per_byte, (double) us / load.bytes, SPEED_WEIGHT);
        if (load.is_staged) {
            out.counters->n_staged++;
            out.counters->staged_bytes += load.bytes;
            out.counters->staged_us += us;
        }
        group.slots[load.slot].source = load.source;
        if (load.source >= 0) {
            out.ahead[load.source].n_copied++;
        }
        set_state(key, SPAC_RESIDENCY_RESIDENT);
        staged.notify_all();
        return;
    }
    set_staged(group.slots[load.slot], false);
    staged.notify_all();
    free_slot(group, load.slot);
    slot_index[key] = -1;
    out.counters->n_load_failures++;
    set_state(key, SPAC_RESIDENCY_ABSENT);
    if (whole[load.il].place >= 0 && !whole[load.il].is_ready) {
        whole[load.il].is_failed = true;
        release(load.il);
        agree_on_whole();
    }
}

void spac_expert_cache::stop() {
    std::lock_guard<std::mutex> lock(mutex);
    stopped = true;
    staged.notify_all();
    work.notify_all();
    idle_now.notify_all();
}

void spac_expert_cache::wait_stopped(uint64_t us) {
    std::unique_lock<std::mutex> lock(mutex);
    work.wait_for(lock, std::chrono::microseconds(us), [&] { return stopped; });
}

bool spac_expert_cache::wait_idle(int32_t timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex);
    return idle_now.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [&] { return stopped || (n_loading == 0 && fills.empty() && ahead.empty() && to_stage.empty() && (queue.empty() || out_of_credit) && (n_filling == 0 || whole_waits)); });
}

int32_t spac_expert_cache::slot_of(uint32_t il, uint32_t ie) {
    std::lock_guard<std::mutex> lock(mutex);
    const uint32_t              key = il * n_expert + ie;
    return state[key] == SPAC_RESIDENCY_RESIDENT ? slot_index[key] : -1;
}

void spac_expert_cache::check() {
    std::lock_guard<std::mutex> lock(mutex);
    auto                        require = [](bool ok, const char * what) {
        if (!ok) {
            throw spac_error(SPAC_STATUS_INTERNAL, what);
        }
    };
    for (const slot_group & group : groups) {
        size_t n_owned = 0, n_ordered = 0, n_kept_empty = 0;
        for (size_t s = 0; s < group.slots.size(); s++) {
            const uint32_t owner = group.slots[s].owner;
            n_kept_empty += owner == NONE && group.slots[s].reserved != NONE;
            if (owner == NONE) {
                continue;
            }
            n_owned++;
            require(slot_index[owner] == (int32_t) s, "an expert's slot is not its own");
            require(state[owner] == SPAC_RESIDENCY_RESIDENT || state[owner] == SPAC_RESIDENCY_LOADING, "a slot's owner is neither resident nor loading");
        }
        for (const auto & level : group.by_utility) {
            n_ordered += level.size();
        }
        require(n_owned + group.free.size() + n_kept_empty == group.slots.size(), "a slot is neither owned nor free nor reserved");
        require(n_ordered <= n_owned, "more slots in eviction order than owned");
    }
    for (uint32_t il = 0; il < layers.size(); il++) {
        for (uint32_t ie = 0; whole[il].is_ready && ie < layers[il].n_expert; ie++) {
            const uint32_t key = il * n_expert + ie;
            require(slot_index[key] == first_slot(il) + (int32_t) ie && state[key] == SPAC_RESIDENCY_RESIDENT, "an expert of a whole layer is not in its place");
        }
    }
}
