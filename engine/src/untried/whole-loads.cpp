#include "whole-loads.h"

#include "base/status.h"

#include <algorithm>

spac_whole_loads::spac_whole_loads(spac_expert_cache & cache) :
    table(cache.table), budget(cache.budget), is_taken(table.groups.size()), layers(table.layers.size()), agreed(table.layers.size(), -1) {
    for (const spac_slot_table::layer_desc & layer : table.layers) {
        if (layer.group >= 0) {
            is_taken[layer.group].resize(table.groups[layer.group].slots.size() / std::max<size_t>(1, layer.n_expert));
        }
    }
    table.sources[SPAC_LOADS_WHOLE] = this;
}

spac_whole_loads::~spac_whole_loads() {
    std::lock_guard<std::mutex> lock(table.mutex);
    table.sources[SPAC_LOADS_WHOLE] = nullptr;
}

void spac_whole_loads::want(const uint8_t * wanted) {
    std::lock_guard<std::mutex> lock(table.mutex);
    bool                        any_now = false;
    for (uint32_t il = 0; il < layers.size(); il++) {
        whole_layer & w = layers[il];
        w.is_wanted     = wanted[il] && table.evict && table.layers[il].can_be_whole && !w.is_failed;
        if (w.place >= 0 && !w.is_wanted && !w.is_ready) {
            release(il); // no graph knows of it
        }
        any_now = any_now || w.is_wanted || w.place >= 0;
    }
    any = any_now;
    agree();
}

std::vector<int32_t> spac_whole_loads::first_slots(uint64_t & version) {
    std::lock_guard<std::mutex> lock(table.mutex);
    version = current_version;
    return agreed;
}

void spac_whole_loads::agree() {
    std::vector<int32_t> now(layers.size(), -1);
    for (uint32_t il = 0; il < layers.size(); il++) {
        if (layers[il].is_ready && layers[il].is_wanted && (agreed[il] >= 0 || n_filling == 0)) {
            now[il] = first_slot(il);
        }
    }
    if (now != agreed) {
        agreed = std::move(now);
        current_version++;
    }
}

// The graph before may still be under way on the device, the one before that is done: where neither had a layer whole, its
// place is free to go.
void spac_whole_loads::enter_graph(const std::vector<int32_t> & of_graph, bool may_reserve) {
    if (!any) {
        return;
    }
    std::lock_guard<std::mutex> lock(table.mutex);
    n_graphs++;
    for (uint32_t il = 0; il < layers.size(); il++) {
        whole_layer & w        = layers[il];
        const bool    is_whole = il < of_graph.size() && of_graph[il] >= 0;
        if (is_whole) {
            w.last_graph = n_graphs;
        } else if (w.is_ready && !w.is_wanted && w.last_graph + 2 <= n_graphs) {
            release(il);
        }
    }
    bool any_now = false;
    for (uint32_t il = 0; il < layers.size(); il++) {
        whole_layer & w = layers[il];
        if (may_reserve && w.is_wanted && w.place < 0) {
            reserve(il);
        }
        any_now = any_now || w.is_wanted || w.place >= 0;
        publish(il, w.place < 0 ? SPAC_LAYER_SPLIT : w.last_graph == n_graphs ? SPAC_LAYER_WHOLE
                                                                              : SPAC_LAYER_FILLING);
    }
    any = any_now;
}

void spac_whole_loads::publish(uint32_t il, spac_layer_mode mode) {
    if (table.out.whole && table.layers[il].can_be_whole) {
        table.out.whole[il] = mode;
    }
}

int32_t spac_whole_loads::first_slot(uint32_t il) const {
    return layers[il].place * (int32_t) table.layers[il].n_expert;
}

void spac_whole_loads::reserve(uint32_t il) {
    const spac_slot_table::layer_desc & layer  = table.layers[il];
    std::vector<bool> &                 places = is_taken[layer.group];
    const auto                          place  = std::find(places.begin(), places.end(), false);
    if (place == places.end()) {
        return;
    }
    *place           = true;
    layers[il].place = (int32_t) (place - places.begin());
    n_filling++;
    table.reserve(il, first_slot(il));
    waits = false;
    table.work.notify_one();
}

// its experts stay where they are until others need the slots
void spac_whole_loads::release(uint32_t il) {
    whole_layer & w = layers[il];
    table.release(il, first_slot(il));
    is_taken[table.layers[il].group][w.place] = false;
    n_filling -= !w.is_ready;
    w.place    = -1;
    w.is_ready = false;
    publish(il, SPAC_LAYER_SPLIT);
    table.work.notify_one();
}

bool spac_whole_loads::can_be_emptied(const spac_slot_table::slot & s) const {
    return s.owner == spac_slot_table::NONE || (s.n_pins == 0 && table.is_resident(s.owner) && !table.is_kept(s.owner, false));
}

// one copy for a layer that is to be whole; false: none is left, or none can start now
bool spac_whole_loads::take_for(uint32_t il, spac_load & load) {
    const spac_slot_table::layer_desc & layer = table.layers[il];
    spac_slot_table::slot_group &       group = table.groups[layer.group];

    const int32_t first      = first_slot(il);
    uint32_t      n_in_place = 0;
    for (uint32_t ie = 0; ie < layer.n_expert; ie++) {
        const uint32_t key   = il * table.n_expert + ie;
        const int32_t  index = first + (int32_t) ie, old = table.slot_of(key);
        n_in_place += old == index && table.is_resident(key);
        if (old == index || !can_be_emptied(group.slots[index]) || (old >= 0 && !can_be_emptied(group.slots[old]))) {
            continue;
        }
        if (!budget.has(layer.expert_bytes)) {
            return false;
        }
        if (old >= 0) { // the expert moves, by way of the host
            table.vacate(group, old);
            table.free_slot(group, old);
        }
        if (group.slots[index].owner != spac_slot_table::NONE) {
            table.vacate(group, index);
        }
        budget.spend(layer.expert_bytes);
        load = table.claim(key, index);
        return true;
    }
    if (n_in_place == layer.n_expert) {
        layers[il].is_ready = true;
        n_filling--;
        agree();
    }
    return false;
}

bool spac_whole_loads::take(spac_load & load) {
    for (uint32_t il = 0; n_filling > 0 && il < layers.size(); il++) {
        if (layers[il].place >= 0 && !layers[il].is_ready && take_for(il, load)) {
            return true;
        }
    }
    waits = n_filling > 0;
    return false;
}

// copies may have waited for these slots
void spac_whole_loads::unpinned() {
    if (n_filling > 0) {
        waits = false;
        table.work.notify_one();
    }
}

void spac_whole_loads::finished(const spac_load & load, bool ok, uint64_t) {
    if (!ok && layers[load.il].place >= 0 && !layers[load.il].is_ready) {
        layers[load.il].is_failed = true;
        release(load.il);
        agree();
    }
}

void spac_whole_loads::check() const {
    for (uint32_t il = 0; il < layers.size(); il++) {
        for (uint32_t ie = 0; layers[il].is_ready && ie < table.layers[il].n_expert; ie++) {
            const uint32_t key = il * table.n_expert + ie;
            if (table.slot_of(key) != first_slot(il) + (int32_t) ie || !table.is_resident(key)) {
                throw spac_error(SPAC_STATUS_INTERNAL, "an expert of a whole layer is not in its place");
            }
        }
    }
}
