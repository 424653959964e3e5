#include "eviction.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace {

struct moment {
    uint32_t il; // of the layer that runs
    uint64_t forward;
    uint32_t n_layer;
};

using history = spac_eviction::history;
using worth   = spac_eviction::worth;

// layers to go until another one's next turn; the present one has just had its own
double until(uint32_t il, const moment & now) {
    return (il + now.n_layer - now.il - 1) % now.n_layer;
}

// SpecMD 4.2: last used or copied in an earlier forward before current, then by layer
worth least_stale(const history & h, double layer, const moment & now) {
    return { (h.forward == now.forward ? now.n_layer : 0) + layer, h.last_use };
}

struct rule {
    const char * name;
    worth (*of)(const history & h, uint32_t il, const moment & now); // NULL: by utility
};

const rule RULES[] = {
    { "lru", [](const history & h, uint32_t, const moment &) { return worth(0, h.turn); } },
    { "lfu", [](const history & h, uint32_t, const moment &) { return worth(h.n_used, h.call); } },
    { "lhu", [](const history & h, uint32_t, const moment &) { return worth(h.n_there, h.call); } }, // every copy is of full precision
    { "score", [](const history & h, uint32_t, const moment &) { return worth(h.weight, 0); } },
    { "least-stale", [](const history & h, uint32_t il, const moment & now) { return least_stale(h, il, now); } },
    { "least-stale:cyclic=1", [](const history & h, uint32_t il, const moment & now) { return least_stale(h, -until(il, now), now); } },
    { "farthest-layer", [](const history &, uint32_t il, const moment & now) { return worth(-std::fabs((double) il - now.il), 0); } },
    { "farthest-layer:cyclic=1", [](const history &, uint32_t il, const moment & now) { return worth(-until(il, now), 0); } },
    { "ema", nullptr },
    { "spac", nullptr },
    { "last", nullptr },
};

size_t index_of(const std::string & name) {
    return std::find_if(std::begin(RULES), std::end(RULES), [&](const rule & r) { return r.name == name; }) - std::begin(RULES);
}

} // namespace

std::vector<std::string> spac_eviction::names() {
    std::vector<std::string> names;
    for (const auto & r : RULES) {
        names.emplace_back(r.name);
    }
    return names;
}

bool spac_eviction::is_known(const std::string & name) {
    return index_of(name) < std::size(RULES);
}

bool spac_eviction::is_by_utility(const std::string & name) {
    return is_known(name) && !RULES[index_of(name)].of;
}

spac_eviction::spac_eviction(const std::string & name, spac_slot_table & table) :
    rule(index_of(name)), table(table), known(table.utility.size()) {}

bool spac_eviction::wants_weights() const {
    return RULES[rule].name == std::string("score");
}

void spac_eviction::use(uint32_t il, const int32_t * experts, const int32_t * slots, const double * weights, size_t n) {
    il_now      = il;
    layer_began = n_turns;
    n_calls++;
    for (size_t i = 0; i < n; i++) {
        history & h = known[il * table.n_expert + experts[i]];
        h.n_used++;
        h.n_there += slots[i] >= 0;
        h.turn    = n_turns++;
        h.call    = n_calls;
        h.forward = h.last_use = table.forward;
        h.weight += weights ? weights[i] : 0;
    }
}

void spac_eviction::come(uint32_t key) {
    history & h = known[key];
    h.n_there++;
    h.forward = table.forward;
    if (h.turn < layer_began) {
        h.turn = n_turns++;
    }
}

worth spac_eviction::worth_of(uint32_t key, const spac_slot_table::slot & slot) const {
    if (!RULES[rule].of) {
        return { table.utility[key], slot.last_used };
    }
    return RULES[rule].of(known[key], table.layer_index(key), { il_now, table.forward, (uint32_t) table.layers.size() });
}

std::vector<int32_t> spac_eviction::victims(spac_slot_table::slot_group & group, size_t n) const {
    std::vector<std::pair<worth, int32_t>> found;
    for (size_t i = 0; table.evict && i < group.slots.size(); i++) {
        const spac_slot_table::slot & s = group.slots[i];
        if (s.owner != spac_slot_table::NONE && table.is_resident(s.owner) && s.n_pins == 0 && !table.is_kept(s.owner, false)) {
            found.push_back({ worth_of(s.owner, s), (int32_t) i });
        }
    }
    n = std::min(n, found.size());
    std::partial_sort(found.begin(), found.begin() + n, found.end());
    std::vector<int32_t> slots;
    for (size_t i = 0; i < n; i++) {
        slots.push_back(found[i].second);
    }
    return slots;
}
