#include "fill-loads.h"

#include <algorithm>

// it is here for a prompt, and goes with it
bool spac_fill_loads::is_passing(uint32_t key) const {
    return table.is_resident(key) && table.group_of(key).slots[table.slot_of(key)].is_staged;
}

// slots of a layer's group that are not reserved
size_t spac_fill_loads::n_free(uint32_t il) const {
    size_t n_taken = n_spoken_for[table.layers[il].group];
    for (const spac_load_source * source : table.sources) {
        n_taken += source ? source->n_slots_needed(il) : 0;
    }
    const size_t n = table.group_of_layer(il).free.size();
    return n - std::min(n, n_taken);
}

// experts of a layer that hold or await a slot
size_t spac_fill_loads::n_held(uint32_t il) const {
    size_t n = 0;
    for (uint32_t key = il * table.n_expert; key < (il + 1) * table.n_expert; key++) {
        n += table.state_of(key) != SPAC_RESIDENCY_ABSENT && !is_passing(key);
    }
    return n;
}

void spac_fill_loads::add(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, size_t n_tokens, size_t n_held_max) {
    size_t room = n_free(il);
    if (room == 0) {
        return;
    }
    room = std::min(room, n_held_max - std::min(n_held_max, n_held(il)));

    std::vector<size_t> absent;
    for (size_t i = 0; i < n; i++) {
        const uint32_t key = il * table.n_expert + experts[i];
        if (table.state_of(key) == SPAC_RESIDENCY_ABSENT || is_passing(key)) {
            absent.push_back(i);
        }
    }
    std::stable_sort(absent.begin(), absent.end(), [&](size_t a, size_t b) { return n_rows[a] > n_rows[b]; });
    for (size_t i = 0; i < std::min(absent.size(), room); i++) {
        const uint32_t key = il * table.n_expert + experts[absent[i]];
        if (is_passing(key)) { // it stays, and the layers behind pass through another slot
            spac_slot_table::slot_group & group = table.group_of(key);
            table.set_staged(group, group.slots[table.slot_of(key)], false);
            continue;
        }
        table.queue(key);
        queue.push(key, n_tokens ? (uint8_t) std::min<uint64_t>(255, 255ull * n_rows[absent[i]] / n_tokens) : table.utility[key]);
        n_spoken_for[table.layers[il].group]++;
    }
    table.work.notify_one();
}

void spac_fill_loads::apply() {
    for (uint32_t key : queue.drain()) {
        queue.push(key, table.utility[key]);
    }
}

void spac_fill_loads::cancel() {
    for (uint32_t key : queue.drain()) {
        table.give_up(key);
    }
    std::fill(n_spoken_for.begin(), n_spoken_for.end(), 0);
}

bool spac_fill_loads::take(spac_load & load) {
    for (uint32_t key; queue.pop(key);) {
        n_spoken_for[table.layer_of(key).group]--;
        if (!table.is_waiting(key)) {
            continue;
        }
        const int32_t index = table.take_free(table.group_of(key));
        if (index < 0) { // the scheduler's loads came first
            table.give_up(key);
            continue;
        }
        load = table.claim(key, index);
        return true;
    }
    return false;
}
