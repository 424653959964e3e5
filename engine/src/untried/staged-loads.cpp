#include "staged-loads.h"

#include <algorithm>

spac_staged_loads::spac_staged_loads(spac_expert_cache & cache) :
    table(cache.table), passages(table.groups.size()) {
    for (const spac_slot_table::layer_desc & layer : table.layers) {
        if (layer.group >= 0) {
            passages[layer.group].n_max = std::max<size_t>(passages[layer.group].n_max, 2 * layer.n_expert);
        }
    }
    table.sources[SPAC_LOADS_STAGED] = this;
}

spac_staged_loads::~spac_staged_loads() {
    std::lock_guard<std::mutex> lock(table.mutex);
    table.sources[SPAC_LOADS_STAGED] = nullptr;
}

bool spac_staged_loads::can_stage() {
    std::lock_guard<std::mutex> lock(table.mutex);
    for (size_t g = 0; g < passages.size(); g++) {
        if (table.groups[g].slots.size() < passages[g].n_max + table.groups[g].n_reserved) {
            return false;
        }
    }
    return table.evict;
}

// none of the layers that are being computed: it was found to be here
bool spac_staged_loads::keeps(uint32_t key, bool) const {
    return is_passing(table.layer_index(key));
}

void spac_staged_loads::stage(uint32_t il, const int32_t * experts, size_t n) {
    std::lock_guard<std::mutex> lock(table.mutex);
    if (!is_passing(il)) {
        passing[0] = passing[1]; // the layer that was passed before the last
        passing[1] = (int32_t) il;
    }
    for (size_t i = 0; i < n; i++) {
        queue.push_back(il * table.n_expert + experts[i]); // what is here already, or is named twice, is found out when its turn comes
    }
    table.work.notify_one();
}

void spac_staged_loads::pin(uint32_t il, const int32_t * experts, size_t n, int32_t * slots) {
    std::unique_lock<std::mutex> lock(table.mutex);

    std::vector<bool> is_used(table.n_expert);
    for (size_t i = 0; i < n; i++) {
        is_used[experts[i]] = true;
    }
    const auto is_unused = [&](uint32_t key) { return table.layer_index(key) == il && !is_used[key % table.n_expert]; };
    queue.erase(std::remove_if(queue.begin(), queue.end(), is_unused), queue.end());
    table.work.notify_one(); // slots were unpinned since

    for (size_t i = 0; i < n; i++) {
        const uint32_t key       = il * table.n_expert + experts[i];
        const auto     is_coming = [&] { return table.state_of(key) == SPAC_RESIDENCY_LOADING || std::find(queue.begin(), queue.end(), key) != queue.end(); };
        table.arrived.wait(lock, [&] { return table.stopped || table.is_resident(key) || !is_coming(); });
        slots[i] = table.is_resident(key) ? table.pin(key) : -1;
    }
}

// those of layers that were passed first; so the borrowed slots are as few as the copies need. Passers of the layers that
// are being computed may stand before others: one that stays resident passes again in the next prompt.
int32_t spac_staged_loads::take_slot(int32_t g) {
    spac_slot_table::slot_group & group  = table.groups[g];
    std::deque<int32_t> &         passed = passages[g].slots;

    const auto is_over = [&](int32_t index) { return !group.slots[index].is_staged; };
    passed.erase(std::remove_if(passed.begin(), passed.end(), is_over), passed.end());
    const auto may_go = [&](int32_t index) {
        const spac_slot_table::slot & s = group.slots[index];
        return s.n_pins == 0 && table.is_resident(s.owner) && !is_passing(table.layer_index(s.owner));
    };
    const auto found = std::find_if(passed.begin(), passed.end(), may_go);
    if (found != passed.end()) {
        const int32_t index = *found;
        passed.erase(found);
        table.vacate(group, index);
        return index;
    }
    if (group.n_staged >= passages[g].n_max) {
        return -1;
    }
    const int32_t index = table.take_free(group);
    return index >= 0 ? index : table.take_victim(group, spac_slot_table::N_LEVELS, true);
}

bool spac_staged_loads::take(spac_load & load) {
    while (!queue.empty()) {
        const uint32_t key     = queue.front();
        const bool     is_here = table.is_here(key);
        const int32_t  g       = table.layer_of(key).group;
        const int32_t  index   = is_here ? -1 : take_slot(g);
        if (!is_here && index < 0) {
            return false; // until the graph has passed a layer
        }
        queue.pop_front();
        if (is_here) {
            continue;
        }
        load           = table.claim(key, index);
        load.is_staged = true;
        table.set_staged(table.groups[g], table.groups[g].slots[index], true);
        passages[g].slots.push_back(index);
        return true;
    }
    return false;
}

// that the layers behind this one still need to pass through
size_t spac_staged_loads::n_slots_needed(uint32_t il) const {
    if (passing[1] < 0) {
        return 0;
    }
    const int32_t g = table.layers[il].group;
    size_t        n = 0;
    for (size_t i = il + 1; i < table.layers.size(); i++) {
        n += table.layers[i].group == g ? table.layers[i].n_expert : 0;
    }
    n = std::min(n, passages[g].n_max);
    return n - std::min(n, table.groups[g].n_staged);
}

// the prompt is over: what decoding uses takes their place at once
void spac_staged_loads::begin_forward() {
    queue.clear();
    passing[0] = passing[1] = -1;
    for (size_t g = 0; g < passages.size(); g++) {
        spac_slot_table::slot_group & group = table.groups[g];
        if (group.n_staged == 0) {
            continue;
        }
        std::deque<int32_t> kept;
        for (const int32_t index : passages[g].slots) {
            spac_slot_table::slot & s = group.slots[index];
            if (s.is_staged && (s.n_pins > 0 || !table.is_resident(s.owner))) {
                kept.push_back(index); // until the next forward
            } else if (s.is_staged) {
                table.vacate(group, index);
                table.free_slot(group, index);
            }
        }
        passages[g].slots = std::move(kept);
    }
}

void spac_staged_loads::finished(const spac_load & load, bool ok, uint64_t us) {
    if (ok && load.is_staged) {
        spac_counters & c = *table.out.counters;
        c.n_staged++;
        c.staged_bytes += load.bytes;
        c.staged_us += us;
    }
}
