#include "wanted-loads.h"

#include <vector>

void spac_wanted_loads::apply(const uint32_t * load, size_t n_load) {
    for (uint32_t key : queue.drain()) {
        if (!table.is_waiting(key)) {
            continue;
        }
        if (table.is_wanted(key)) {
            queue.push(key, table.utility[key]);
        } else {
            table.give_up(key);
        }
    }
    for (size_t i = 0; i < n_load; i++) {
        const uint32_t key   = load[i];
        const bool     valid = key < table.utility.size() && table.layer_of(key).group >= 0 && key % table.n_expert < table.layer_of(key).n_expert;
        if (valid && table.state_of(key) == SPAC_RESIDENCY_ABSENT && table.is_wanted(key)) {
            table.queue(key);
            queue.push(key, table.utility[key]);
        }
    }
    out_of_credit = false;
}

void spac_wanted_loads::cancel() {
    for (uint32_t key : queue.drain()) {
        table.give_up(key);
    }
}

// keys come most useful first: where one finds no victim, those after it find none either, and are not looked for
bool spac_wanted_loads::take(spac_load & load) {
    out_of_credit = false;
    std::vector<bool> is_full(table.groups.size());
    for (uint32_t key; queue.pop(key);) {
        const spac_slot_table::layer_desc & layer = table.layer_of(key);
        if (!table.is_waiting(key)) {
            continue;
        }
        if (!table.is_wanted(key)) {
            table.give_up(key);
            continue;
        }
        if (!budget.has(layer.expert_bytes)) {
            queue.push_front(key, table.utility[key]);
            out_of_credit = true;
            return false;
        }
        const int32_t index = is_full[layer.group] ? -1 : table.take_slot(table.group_of(key), table.utility[key]);
        if (index < 0) {
            is_full[layer.group] = true;
            table.give_up(key); // nothing less useful to evict
            continue;
        }
        budget.spend(layer.expert_bytes);
        load = table.claim(key, index);
        return true;
    }
    return false;
}
