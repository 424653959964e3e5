// Prompts whose experts pass through the slots: one layer is computed while the next one's experts are copied.
#include "expert-cache.h"

#include <algorithm>

bool spac_expert_cache::can_stage() {
    std::lock_guard<std::mutex> lock(mutex);
    return evict && std::all_of(groups.begin(), groups.end(), [](const slot_group & g) { return g.slots.size() >= g.n_staged_max + g.n_reserved; });
}

bool spac_expert_cache::is_passing(uint32_t il) const {
    return (int32_t) il == passing[0] || (int32_t) il == passing[1];
}

void spac_expert_cache::set_staged(slot & s, bool is_staged) {
    if (s.is_staged != is_staged) {
        s.is_staged = is_staged;
        groups[layer_of(s.owner).group].n_staged += is_staged ? 1 : -1;
    }
}

void spac_expert_cache::stage(uint32_t il, const int32_t * experts, size_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_passing(il)) {
        passing[0] = passing[1]; // the layer that was passed before the last
        passing[1] = (int32_t) il;
    }
    for (size_t i = 0; i < n; i++) {
        to_stage.push_back(il * n_expert + experts[i]); // what is here already, or is named twice, is found out when its turn comes
    }
    work.notify_one();
}

void spac_expert_cache::pin_staged(uint32_t il, const int32_t * experts, size_t n, int32_t * slots) {
    std::unique_lock<std::mutex> lock(mutex);

    std::vector<bool> is_used(n_expert);
    for (size_t i = 0; i < n; i++) {
        is_used[experts[i]] = true;
    }
    const auto is_unused = [&](uint32_t key) { return key / n_expert == il && !is_used[key % n_expert]; };
    to_stage.erase(std::remove_if(to_stage.begin(), to_stage.end(), is_unused), to_stage.end());
    work.notify_one(); // slots were unpinned since

    const int32_t group = layers[il].group;
    for (size_t i = 0; i < n; i++) {
        const uint32_t key       = il * n_expert + experts[i];
        const auto     is_coming = [&] { return state[key] == SPAC_RESIDENCY_LOADING || std::find(to_stage.begin(), to_stage.end(), key) != to_stage.end(); };
        staged.wait(lock, [&] { return stopped || state[key] == SPAC_RESIDENCY_RESIDENT || !is_coming(); });
        slots[i] = state[key] == SPAC_RESIDENCY_RESIDENT ? slot_index[key] : -1;
        if (slots[i] >= 0) {
            slot & s = groups[group].slots[slots[i]];
            s.n_pins++;
            s.last_used = forward;
            pins.push_back({ group, slots[i], forward });
        }
    }
}

// those of layers that were passed first; so the borrowed slots are as few as the copies need. Passers of the layers that
// are being computed may stand before others: one that stays resident passes again in the next prompt.
int32_t spac_expert_cache::take_stage_slot(slot_group & group) {
    const auto is_over = [&](int32_t index) { return !group.slots[index].is_staged; };
    group.staged.erase(std::remove_if(group.staged.begin(), group.staged.end(), is_over), group.staged.end());
    const auto may_go = [&](int32_t index) {
        const slot & s = group.slots[index];
        return s.n_pins == 0 && state[s.owner] == SPAC_RESIDENCY_RESIDENT && !is_passing(s.owner / n_expert);
    };
    const auto found = std::find_if(group.staged.begin(), group.staged.end(), may_go);
    if (found != group.staged.end()) {
        const int32_t index = *found;
        group.staged.erase(found);
        vacate(group, index);
        return index;
    }
    if (group.n_staged >= group.n_staged_max) {
        return -1;
    }
    if (!group.free.empty()) {
        const int32_t index = group.free.back();
        group.free.pop_back();
        return index;
    }
    return take_victim(group, spac_prefetch_queue::N_LEVELS, true);
}

bool spac_expert_cache::take_staged(spac_load & load) {
    while (!to_stage.empty()) {
        const uint32_t key     = to_stage.front();
        const bool     is_here = state[key] == SPAC_RESIDENCY_RESIDENT || state[key] == SPAC_RESIDENCY_LOADING;
        const int32_t  group   = layer_of(key).group;
        const int32_t  index   = is_here ? -1 : take_stage_slot(groups[group]);
        if (!is_here && index < 0) {
            return false; // until the graph has passed a layer
        }
        to_stage.pop_front();
        if (is_here) {
            continue;
        }
        load           = claim(key, index);
        load.is_staged = true;
        set_staged(groups[group].slots[index], true);
        groups[group].staged.push_back(index);
        return true;
    }
    return false;
}

// slots that the layers behind this one still need to pass through
size_t spac_expert_cache::n_to_stage(uint32_t il) const {
    const slot_group & group = groups[layers[il].group];
    size_t             n     = 0;
    for (size_t i = il + 1; i < layers.size(); i++) {
        n += layers[i].group == layers[il].group ? layers[i].n_expert : 0;
    }
    n = std::min(n, group.n_staged_max);
    return n - std::min(n, group.n_staged);
}

// the prompt is over: what decoding uses takes their place at once
void spac_expert_cache::release_staged() {
    to_stage.clear();
    passing[0] = passing[1] = -1;
    for (slot_group & group : groups) {
        if (group.n_staged == 0) {
            continue;
        }
        std::deque<int32_t> kept;
        for (const int32_t index : group.staged) {
            const slot & s = group.slots[index];
            if (s.is_staged && (s.n_pins > 0 || state[s.owner] != SPAC_RESIDENCY_RESIDENT)) {
                kept.push_back(index); // until the next forward
            } else if (s.is_staged) {
                vacate(group, index);
                free_slot(group, index);
            }
        }
        group.staged = std::move(kept);
    }
}
