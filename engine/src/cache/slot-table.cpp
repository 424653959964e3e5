#include "slot-table.h"

#include "base/status.h"

#include <algorithm>

spac_slot_table::spac_slot_table(std::vector<layer_desc> layers, const std::vector<int32_t> & group_slots, uint32_t n_expert, bool evict, const published & out) :
    layers(std::move(layers)), n_expert(n_expert), evict(evict), out(out), mutex(out.mutex ? *out.mutex : own_mutex), groups(group_slots.size()),
    utility(this->layers.size() * n_expert, 0), state(utility.size(), SPAC_RESIDENCY_ABSENT), slot_index(utility.size(), -1), tau(this->layers.size(), 1) {
    for (size_t i = 0; i < groups.size(); i++) {
        groups[i].slots.resize(group_slots[i]);
        groups[i].by_utility.resize(N_LEVELS);
        for (int32_t s = group_slots[i] - 1; s >= 0; s--) {
            groups[i].free.push_back(s);
        }
    }
}

// ---- from state to state

void spac_slot_table::set_state(uint32_t key, spac_residency new_state) {
    state[key]         = new_state;
    out.residency[key] = new_state;
}

void spac_slot_table::give_up(uint32_t key) {
    if (is_waiting(key)) {
        set_state(key, SPAC_RESIDENCY_ABSENT);
    }
}

spac_load spac_slot_table::claim(uint32_t key, int32_t index) {
    slot & s = group_of(key).slots[index];
    if (s.n_pins > 0) {
        out.counters->n_pinned_steals++;
    }
    const int64_t left = s.owner == NONE ? -1 : (int64_t) s.owner;
    s.owner            = key;
    s.source           = -1;
    slot_index[key]    = index;
    set_state(key, SPAC_RESIDENCY_LOADING);
    n_loading++;
    spac_load load = { layer_index(key), key % n_expert, index, layer_of(key).expert_bytes };
    load.left      = left;
    return load;
}

void spac_slot_table::arrive(const spac_load & load) {
    const uint32_t key   = load.il * n_expert + load.ie;
    slot_group &   group = group_of(key);
    slot &         s     = group.slots[load.slot];
    n_loading--;
    s.last_used = forward;
    s.source    = load.source;
    group.by_utility[utility[key]].push_back(load.slot);
    set_state(key, SPAC_RESIDENCY_RESIDENT);
    arrived.notify_all();
}

void spac_slot_table::fail(const spac_load & load) {
    const uint32_t key   = load.il * n_expert + load.ie;
    slot_group &   group = group_of(key);
    n_loading--;
    set_staged(group, group.slots[load.slot], false);
    free_slot(group, load.slot);
    slot_index[key] = -1;
    set_state(key, SPAC_RESIDENCY_ABSENT);
    arrived.notify_all();
}

void spac_slot_table::vacate(slot_group & group, int32_t index) {
    const std::vector<int32_t> & resident = group.by_utility[utility[group.slots[index].owner]];
    vacate(group, index, std::find(resident.begin(), resident.end(), index));
}

void spac_slot_table::vacate(slot_group & group, int32_t index, std::vector<int32_t>::const_iterator at) {
    slot & s = group.slots[index];
    group.by_utility[utility[s.owner]].erase(at);
    set_staged(group, s, false);
    set_state(s.owner, SPAC_RESIDENCY_ABSENT);
    slot_index[s.owner] = -1;
    out.counters->n_evictions++;
    if (s.source >= 0) {
        out.ahead[s.source].n_wasted++;
    }
}

// ---- slots for those that come

int32_t spac_slot_table::take_free(slot_group & group) {
    if (group.free.empty()) {
        return -1;
    }
    const int32_t index = group.free.back();
    group.free.pop_back();
    return index;
}

int32_t spac_slot_table::take_slot(slot_group & group, int n_levels) {
    const int32_t index = take_free(group);
    return index >= 0 ? index : take_victim(group, n_levels);
}

bool spac_slot_table::is_kept(uint32_t key, bool for_prompt) const {
    return std::any_of(sources.begin(), sources.end(), [&](const spac_load_source * source) { return source && source->keeps(key, for_prompt); });
}

int32_t spac_slot_table::take_victim(slot_group & group, int n_levels, bool for_prompt) {
    const auto may_go = [&](const slot & s) {
        return s.n_pins == 0 && s.reserved == NONE && (for_prompt || !is_wanted(s.owner)) && !is_kept(s.owner, for_prompt);
    };
    for (int level = 0; evict && level < n_levels; level++) {
        const std::vector<int32_t> & resident = group.by_utility[level];

        auto best = resident.end();
        for (auto it = resident.begin(); it != resident.end(); ++it) {
            const slot & s        = group.slots[*it];
            const bool   is_older = best == resident.end() || s.last_used < group.slots[*best].last_used;
            if (is_older && may_go(s)) {
                best = it;
            }
        }
        if (best != resident.end()) {
            const int32_t index = *best;
            vacate(group, index, best);
            return index;
        }
    }
    return -1;
}

void spac_slot_table::free_slot(slot_group & group, int32_t index) {
    slot & s = group.slots[index];
    s.owner  = NONE;
    if (s.reserved == NONE) {
        group.free.push_back(index);
    }
}

void spac_slot_table::set_staged(slot_group & group, slot & s, bool is_staged) {
    if (s.is_staged != is_staged) {
        s.is_staged = is_staged;
        group.n_staged += is_staged ? 1 : -1;
    }
}

void spac_slot_table::reserve(uint32_t il, int32_t first) {
    slot_group &  group = group_of_layer(il);
    const int32_t end   = first + (int32_t) layers[il].n_expert;
    group.n_reserved += layers[il].n_expert;
    for (int32_t index = first; index < end; index++) {
        slot & s   = group.slots[index];
        s.reserved = il * n_expert + (index - first);
        set_staged(group, s, false);
    }
    const auto is_here = [&](int32_t index) { return index >= first && index < end; };
    group.free.erase(std::remove_if(group.free.begin(), group.free.end(), is_here), group.free.end());
}

void spac_slot_table::release(uint32_t il, int32_t first) {
    slot_group & group = group_of_layer(il);
    group.n_reserved -= layers[il].n_expert;
    for (int32_t index = first; index < first + (int32_t) layers[il].n_expert; index++) {
        slot & s   = group.slots[index];
        s.reserved = NONE;
        if (s.owner == NONE) {
            group.free.push_back(index);
        }
    }
}

// ---- pins

int32_t spac_slot_table::pin(uint32_t key) {
    const int32_t index = slot_index[key];
    slot &        s     = group_of(key).slots[index];
    s.n_pins++;
    s.last_used = forward;
    pins.push_back({ layer_of(key).group, index, forward });
    return index;
}

void spac_slot_table::unpin_before(uint64_t first_kept) {
    size_t n_kept = 0;
    for (const pinned & p : pins) {
        if (p.forward < first_kept) {
            groups[p.group].slots[p.slot].n_pins--;
        } else {
            pins[n_kept++] = p;
        }
    }
    pins.resize(n_kept);
    for (spac_load_source * source : sources) {
        if (source) {
            source->unpinned();
        }
    }
}

// ---- a decision

void spac_slot_table::set_utilities(const uint8_t * new_utility, const uint8_t * new_tau) {
    std::copy_n(new_utility, utility.size(), utility.begin());
    std::copy_n(new_tau, tau.size(), tau.begin());
    rebuild_order();
}

// O(slots): the order is by utility, and a decision changes all utilities at once
void spac_slot_table::rebuild_order() {
    for (slot_group & group : groups) {
        for (auto & level : group.by_utility) {
            level.clear();
        }
        for (size_t s = 0; s < group.slots.size(); s++) {
            const uint32_t owner = group.slots[s].owner;
            if (owner != NONE && is_resident(owner)) {
                group.by_utility[utility[owner]].push_back((int32_t) s);
            }
        }
    }
}

void spac_slot_table::check() const {
    const auto require = [](bool ok, const char * what) {
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
            require(is_here(owner), "a slot's owner is neither resident nor loading");
        }
        for (const auto & level : group.by_utility) {
            n_ordered += level.size();
        }
        require(n_owned + group.free.size() + n_kept_empty == group.slots.size(), "a slot is neither owned nor free nor reserved");
        require(n_ordered <= n_owned, "more slots in eviction order than owned");
    }
    for (const spac_load_source * source : sources) {
        if (source) {
            source->check();
        }
    }
}
