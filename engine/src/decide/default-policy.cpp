#include "default-policy.h"

#include <algorithm>
#include <array>
#include <cmath>

static constexpr float    DECAY           = 0.9f;
static constexpr float    LEVELS_PER_ONE  = 64.0f; // utility of an expert that each forward activates once
static constexpr uint32_t LOADS_PER_LAYER = 2;     // at most, per forward: caches that admit freely thrash

spac_default_policy::spac_default_policy(uint32_t n_layer, uint32_t n_expert, std::vector<int32_t> layer_group, std::vector<int32_t> group_slots) :
    utility(n_layer * n_expert), tau(n_layer, 1), n_layer(n_layer), n_expert(n_expert), layer_group(std::move(layer_group)),
    group_slots(std::move(group_slots)), demand(n_layer * n_expert), last(n_layer * n_expert) {}

void spac_default_policy::update(const uint32_t * counts, const uint8_t * residency) {
    for (size_t i = 0; i < demand.size(); i++) {
        demand[i] = DECAY * demand[i] + (1 - DECAY) * (float) (counts[i] - last[i]);
        last[i]   = counts[i];
    }
    set_utilities();
    set_thresholds();
    set_loads(residency);
}

void spac_default_policy::set_utilities() {
    for (size_t i = 0; i < demand.size(); i++) {
        utility[i] = (uint8_t) std::min(255.0f, std::ceil(demand[i] * LEVELS_PER_ONE - 0.25f));
    }
}

// the lowest level at which a group's wanted experts still fit its slots
void spac_default_policy::set_thresholds() {
    for (size_t g = 0; g < group_slots.size(); g++) {
        std::array<uint32_t, 256> histogram = {};
        for (uint32_t il = 0; il < n_layer; il++) {
            if (layer_group[il] == (int32_t) g) {
                for (uint32_t ie = 0; ie < n_expert; ie++) {
                    histogram[utility[il * n_expert + ie]]++;
                }
            }
        }
        int     level = 255;
        int64_t room  = group_slots[g];
        while (level > 1 && room >= histogram[level]) {
            room -= histogram[level--];
        }
        for (uint32_t il = 0; il < n_layer; il++) {
            if (layer_group[il] == (int32_t) g) {
                tau[il] = (uint8_t) level;
            }
        }
    }
}

void spac_default_policy::set_loads(const uint8_t * residency) {
    load.clear();
    std::vector<uint32_t> wanted;
    for (uint32_t il = 0; il < n_layer; il++) {
        if (layer_group[il] < 0) {
            continue;
        }
        wanted.clear();
        for (uint32_t key = il * n_expert; key < (il + 1) * n_expert; key++) {
            if (utility[key] >= tau[il] && residency[key] == 0) {
                wanted.push_back(key);
            }
        }
        const size_t n = std::min<size_t>(wanted.size(), LOADS_PER_LAYER);
        std::partial_sort(wanted.begin(), wanted.begin() + n, wanted.end(), [&](uint32_t a, uint32_t b) { return utility[a] > utility[b]; });
        load.insert(load.end(), wanted.begin(), wanted.begin() + n);
    }
}
