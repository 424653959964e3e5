// Layers that the device has whole: which slots are theirs, and how they fill.
//
// Such a layer has a place, n_expert slots of its group that follow each other, each reserved for one expert. It is taken
// from whoever is there, expert by expert, as the byte budget allows; meanwhile the layer is split. Once all are in place it
// is ready, and whole in the next graph that is built. A place is given back when the last graph with it is done.
#include "expert-cache.h"

#include <algorithm>

void spac_expert_cache::want_whole(const uint8_t * wanted) {
    std::lock_guard<std::mutex> lock(mutex);
    bool                        any = false;
    for (uint32_t il = 0; il < layers.size(); il++) {
        whole_layer & w = whole[il];
        w.is_wanted     = wanted[il] && evict && layers[il].can_be_whole && !w.is_failed;
        if (w.place >= 0 && !w.is_wanted && !w.is_ready) {
            release(il); // no graph knows of it
        }
        any = any || w.is_wanted || w.place >= 0;
    }
    any_whole = any;
    agree_on_whole();
}

std::vector<int32_t> spac_expert_cache::whole_layers(uint64_t & version) {
    std::lock_guard<std::mutex> lock(mutex);
    version = version_of_whole;
    return agreed;
}

void spac_expert_cache::agree_on_whole() {
    std::vector<int32_t> now(layers.size(), -1);
    for (uint32_t il = 0; il < layers.size(); il++) {
        if (whole[il].is_ready && whole[il].is_wanted && (agreed[il] >= 0 || n_filling == 0)) {
            now[il] = first_slot(il);
        }
    }
    if (now != agreed) {
        agreed = std::move(now);
        version_of_whole++;
    }
}

// The graph before may still be under way on the device, the one before that is done: where neither had a layer whole, its
// place is free to go.
void spac_expert_cache::enter_graph(const std::vector<int32_t> & of_graph, bool may_reserve) {
    if (!any_whole) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex);
    n_graphs++;
    for (uint32_t il = 0; il < layers.size(); il++) {
        whole_layer & w        = whole[il];
        const bool    is_whole = il < of_graph.size() && of_graph[il] >= 0;
        if (is_whole) {
            w.last_graph = n_graphs;
        } else if (w.is_ready && !w.is_wanted && w.last_graph + 2 <= n_graphs) {
            release(il);
        }
    }
    bool any = false;
    for (uint32_t il = 0; il < layers.size(); il++) {
        whole_layer & w = whole[il];
        if (may_reserve && w.is_wanted && w.place < 0) {
            reserve(il);
        }
        any = any || w.is_wanted || w.place >= 0;
        publish_whole(il, w.place < 0 ? SPAC_LAYER_SPLIT : w.last_graph == n_graphs ? SPAC_LAYER_WHOLE
                                                                                    : SPAC_LAYER_FILLING);
    }
    any_whole = any;
}

void spac_expert_cache::publish_whole(uint32_t il, spac_layer_mode mode) {
    if (out.whole && layers[il].can_be_whole) {
        out.whole[il] = mode;
    }
}

int32_t spac_expert_cache::first_slot(uint32_t il) const {
    return whole[il].place * (int32_t) layers[il].n_expert;
}

void spac_expert_cache::reserve(uint32_t il) {
    slot_group & group = groups[layers[il].group];
    const auto   place = std::find(group.is_taken.begin(), group.is_taken.end(), false);
    if (place == group.is_taken.end()) {
        return;
    }
    *place          = true;
    whole[il].place = (int32_t) (place - group.is_taken.begin());
    n_filling++;
    group.n_reserved += layers[il].n_expert;
    const int32_t first = first_slot(il), end = first + (int32_t) layers[il].n_expert;
    for (int32_t index = first; index < end; index++) {
        slot & s   = group.slots[index];
        s.reserved = il * n_expert + (index - first);
        if (s.is_staged) {
            set_staged(s, false);
        }
    }
    const auto is_here = [&](int32_t index) { return index >= first && index < end; };
    group.free.erase(std::remove_if(group.free.begin(), group.free.end(), is_here), group.free.end());
    whole_waits = false;
    work.notify_one();
}

// its experts stay where they are until others need the slots
void spac_expert_cache::release(uint32_t il) {
    slot_group &  group = groups[layers[il].group];
    const int32_t first = first_slot(il);
    for (int32_t index = first; index < first + (int32_t) layers[il].n_expert; index++) {
        slot & s   = group.slots[index];
        s.reserved = NONE;
        if (s.owner == NONE) {
            group.free.push_back(index);
        }
    }
    group.n_reserved -= layers[il].n_expert;
    group.is_taken[whole[il].place] = false;
    n_filling -= !whole[il].is_ready;
    whole[il].place    = -1;
    whole[il].is_ready = false;
    publish_whole(il, SPAC_LAYER_SPLIT);
    work.notify_one();
}

// nobody owns it any more; one that is reserved waits for its expert
void spac_expert_cache::free_slot(slot_group & group, int32_t index) {
    slot & s = group.slots[index];
    s.owner  = NONE;
    if (s.reserved == NONE) {
        group.free.push_back(index);
    }
}

bool spac_expert_cache::can_be_emptied(const slot & s) const {
    return s.owner == NONE ||
           (s.n_pins == 0 && state[s.owner] == SPAC_RESIDENCY_RESIDENT && !is_expected(s.owner) && !is_passing(s.owner / n_expert));
}

// one copy for a layer that is to be whole; false: none is left, or none can start now
bool spac_expert_cache::take_for_whole(uint32_t il, spac_load & load) {
    slot_group &  group      = groups[layers[il].group];
    const int32_t first      = first_slot(il);
    uint32_t      n_in_place = 0;
    for (uint32_t ie = 0; ie < layers[il].n_expert; ie++) {
        const uint32_t key   = il * n_expert + ie;
        const int32_t  index = first + (int32_t) ie, old = slot_index[key];
        n_in_place += old == index && state[key] == SPAC_RESIDENCY_RESIDENT;
        if (old == index || !can_be_emptied(group.slots[index]) || (old >= 0 && !can_be_emptied(group.slots[old]))) {
            continue;
        }
        if (!has_credit(layers[il].expert_bytes)) {
            return false;
        }
        if (old >= 0) { // the expert moves, by way of the host
            vacate(group, old);
            free_slot(group, old);
        }
        if (group.slots[index].owner != NONE) {
            vacate(group, index);
        }
        if (credit != UINT64_MAX) {
            credit -= layers[il].expert_bytes;
        }
        load = claim(key, index);
        return true;
    }
    if (n_in_place == layers[il].n_expert) {
        whole[il].is_ready = true;
        n_filling--;
        agree_on_whole();
    }
    return false;
}

bool spac_expert_cache::take_whole(spac_load & load) {
    for (uint32_t il = 0; n_filling > 0 && il < layers.size(); il++) {
        if (whole[il].place >= 0 && !whole[il].is_ready && take_for_whole(il, load)) {
            return true;
        }
    }
    whole_waits = n_filling > 0;
    return false;
}
