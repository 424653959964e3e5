#include "ahead-loads.h"

#include "base/average.h"

#include <algorithm>

static constexpr double SPEED_WEIGHT = 0.1; // of the latest copy in the measured speed

bool spac_ahead_loads::keeps(uint32_t key, bool for_prompt) const {
    const uint32_t il = table.layer_index(key);
    for (uint32_t source = 0; !for_prompt && source < SPAC_N_AHEAD; source++) {
        const prediction & p = prediction_of(source, il);
        if (!has_run(il, p.forward) && p.is_expected[key % table.n_expert]) {
            return true;
        }
    }
    return false;
}

// what was expected of it, against what its router chose; what is still waiting for it comes too late
void spac_ahead_loads::run(uint32_t il, const int32_t * experts, size_t n) {
    for (uint32_t source = 0; source < SPAC_N_AHEAD; source++) {
        const prediction & p = prediction_of(source, il);
        if (p.forward != table.forward || (int32_t) il <= last_il) {
            continue;
        }
        spac_ahead_stats & stats = table.out.ahead[source];
        stats.n_predicted += std::count(p.is_expected.begin(), p.is_expected.end(), true);
        stats.n_chosen += n;
        stats.n_hit += std::count_if(experts, experts + n, [&](int32_t ie) { return p.is_expected[ie]; });
    }
    last_il = (int32_t) il;
    drop([&](const awaited & a) { return a.forward == table.forward && table.layer_index(a.key) == il; });
}

void spac_ahead_loads::begin_forward() {
    last_il = -1;
    drop([&](const awaited & a) { return a.forward < table.forward; });
}

template <typename is_over_t>
void spac_ahead_loads::drop(is_over_t is_over) {
    for (size_t n = queue.size(); n > 0; n--) {
        const awaited a = queue.front();
        queue.pop_front();
        if (is_over(a)) {
            table.out.ahead[a.source].n_dropped++;
        } else {
            queue.push_back(a);
        }
    }
}

// bytes that are sure to be copied in time, and that the byte budget can spare; before the first copy: of one expert
double spac_ahead_loads::room(double time_us, uint64_t bytes) const {
    uint64_t left    = budget.left;
    double   before  = (double) table.n_loading * bytes + (double) queue.size() * bytes;
    uint64_t waiting = wanted.n_waiting() * bytes;
    if (budget.has_limit()) {
        waiting = std::min(waiting, left);
        left    = left - waiting - std::min(left - waiting, queue.size() * bytes);
    }
    const double in_time = us_per_byte == 0 ? (time_us > 0 && before == 0 ? (double) bytes : 0) : time_us / us_per_byte - before - (double) waiting;
    return budget.has_limit() ? std::min(in_time, (double) left) : in_time;
}

size_t spac_ahead_loads::expect(const spac_expectation & what, const std::vector<int32_t> & experts) {
    if (has_run(what.il, what.forward)) {
        return 0;
    }
    prediction & p = prediction_of(what.source, what.il);
    if (p.forward != what.forward) {
        p.forward = what.forward;
        p.is_expected.assign(table.n_expert, false);
    }
    const uint64_t     bytes     = table.layers[what.il].expert_bytes;
    spac_ahead_stats & stats     = table.out.ahead[what.source];
    double             room_left = what.may_copy ? room(what.time_us, bytes) : 0;
    size_t             n_absent  = 0;
    for (int32_t ie : experts) {
        const uint32_t key    = what.il * table.n_expert + ie;
        const bool     is_new = !p.is_expected[ie]; // else another token's
        p.is_expected[ie]     = true;
        if (table.is_here(key) || std::any_of(queue.begin(), queue.end(), [&](const awaited & a) { return a.key == key; })) {
            continue;
        }
        n_absent += is_new;
        if (room_left < (double) bytes) {
            stats.n_cut += is_new && !table.group_of(key).slots.empty(); // without a device there is no copy to make
            continue;
        }
        room_left -= (double) bytes;
        queue.push_back({ key, what.source, what.forward });
        stats.n_queued++;
    }
    if (!queue.empty()) {
        table.work.notify_one();
    }
    return n_absent;
}

// into free slots, or those of experts that the scheduler does not want: what is used once is worth no more
bool spac_ahead_loads::take(spac_load & load) {
    while (!queue.empty()) {
        const awaited a = queue.front();
        queue.pop_front();
        const uint64_t bytes    = table.layer_of(a.key).expert_bytes;
        const bool     may_come = !table.is_here(a.key) && budget.has(bytes);
        const int32_t  index    = may_come ? table.take_slot(table.group_of(a.key), spac_slot_table::N_LEVELS) : -1;
        if (index < 0) {
            table.out.ahead[a.source].n_dropped++;
            continue;
        }
        budget.spend(bytes);
        load        = table.claim(a.key, index);
        load.source = a.source;
        return true;
    }
    return false;
}

void spac_ahead_loads::finished(const spac_load & load, bool ok, uint64_t us) {
    if (!ok) {
        return;
    }
    spac_blend(us_per_byte, (double) us / load.bytes, SPEED_WEIGHT);
    if (load.source >= 0) {
        table.out.ahead[load.source].n_copied++;
    }
}
