// What predictors expect of the cache: who stays, and which copies go before all others.
#include "expert-cache.h"

#include <algorithm>

uint64_t spac_expert_cache::forward_of(uint32_t il) {
    std::lock_guard<std::mutex> lock(mutex);
    return forward + ((int32_t) il <= last_il);
}

bool spac_expert_cache::has_run(uint32_t il, uint64_t in_forward) {
    std::lock_guard<std::mutex> lock(mutex);
    return is_over(il, in_forward);
}

bool spac_expert_cache::is_over(uint32_t il, uint64_t in_forward) const {
    return in_forward < forward || (in_forward == forward && (int32_t) il <= last_il);
}

bool spac_expert_cache::is_expected(uint32_t key) const {
    const uint32_t il = key / n_expert;
    for (uint32_t source = 0; source < SPAC_N_AHEAD; source++) {
        const prediction & p = predictions[source * layers.size() + il];
        if (!is_over(il, p.forward) && p.is_expected[key % n_expert]) {
            return true;
        }
    }
    return false;
}

// what was expected of a layer that runs now, against what its router chose
void spac_expert_cache::note_outcome(uint32_t il, const int32_t * experts, size_t n) {
    for (uint32_t source = 0; source < SPAC_N_AHEAD; source++) {
        const prediction & p = predictions[source * layers.size() + il];
        if (p.forward != forward || (int32_t) il <= last_il) {
            continue;
        }
        spac_ahead_stats & stats = out.ahead[source];
        stats.n_predicted += std::count(p.is_expected.begin(), p.is_expected.end(), true);
        stats.n_chosen += n;
        stats.n_hit += std::count_if(experts, experts + n, [&](int32_t ie) { return p.is_expected[ie]; });
    }
}

// those of a layer that runs, or (NONE) of forwards that are over
void spac_expert_cache::drop_ahead(uint32_t il) {
    for (size_t n = ahead.size(); n > 0; n--) {
        const awaited a = ahead.front();
        ahead.pop_front();
        if (il == NONE ? a.forward < forward : a.forward == forward && a.key / n_expert == il) {
            out.ahead[a.source].n_dropped++;
        } else {
            ahead.push_back(a);
        }
    }
}

// bytes that are sure to be copied in time, and that the byte budget can spare; before the first copy: of one expert
double spac_expert_cache::room_for_ahead(double time_us, uint64_t bytes) const {
    uint64_t credit_left = credit;
    double   before      = (double) n_loading * bytes + (double) ahead.size() * bytes;
    uint64_t wanted      = queue.size() * bytes;
    if (credit != UINT64_MAX) {
        wanted      = std::min(wanted, credit);
        credit_left = credit - wanted - std::min(credit - wanted, ahead.size() * bytes);
    }
    const double in_time = us_per_byte == 0 ? (time_us > 0 && before == 0 ? (double) bytes : 0) : time_us / us_per_byte - before - (double) wanted;
    return credit == UINT64_MAX ? in_time : std::min(in_time, (double) credit_left);
}

size_t spac_expert_cache::expect(const spac_expectation & what, const std::vector<int32_t> & experts) {
    std::lock_guard<std::mutex> lock(mutex);
    if (is_over(what.il, what.forward)) {
        return 0;
    }
    prediction & p = predictions[what.source * layers.size() + what.il];
    if (p.forward != what.forward) {
        p.forward = what.forward;
        p.is_expected.assign(n_expert, false);
    }
    const uint64_t     bytes    = layers[what.il].expert_bytes;
    spac_ahead_stats & stats    = out.ahead[what.source];
    double             room     = what.may_copy ? room_for_ahead(what.time_us, bytes) : 0;
    size_t             n_absent = 0;
    for (int32_t ie : experts) {
        const uint32_t key    = what.il * n_expert + ie;
        const bool     is_new = !p.is_expected[ie]; // else another token's
        p.is_expected[ie]     = true;
        const bool is_here    = state[key] == SPAC_RESIDENCY_RESIDENT || state[key] == SPAC_RESIDENCY_LOADING;
        if (is_here || std::any_of(ahead.begin(), ahead.end(), [&](const awaited & a) { return a.key == key; })) {
            continue;
        }
        n_absent += is_new;
        if (room < (double) bytes) {
            stats.n_cut += is_new && !groups[layers[what.il].group].slots.empty(); // without a device there is no copy to make
            continue;
        }
        room -= (double) bytes;
        ahead.push_back({ key, what.source, what.forward });
        stats.n_queued++;
    }
    if (!ahead.empty()) {
        work.notify_one();
    }
    return n_absent;
}

double spac_expert_cache::copy_us(uint32_t il) {
    std::lock_guard<std::mutex> lock(mutex);
    return us_per_byte * layers[il].expert_bytes;
}

// into free slots, or those of experts that the scheduler does not want: what is used once is worth no more
bool spac_expert_cache::take_ahead(spac_load & load) {
    while (!ahead.empty()) {
        const awaited a = ahead.front();
        ahead.pop_front();
        const layer_desc & layer   = layer_of(a.key);
        const bool         is_here = state[a.key] == SPAC_RESIDENCY_RESIDENT || state[a.key] == SPAC_RESIDENCY_LOADING;
        const int32_t      index   = is_here || !has_credit(layer.expert_bytes) ? -1 : take_slot(groups[layer.group], spac_prefetch_queue::N_LEVELS);
        if (index < 0) {
            out.ahead[a.source].n_dropped++;
            continue;
        }
        if (credit != UINT64_MAX) {
            credit -= layer.expert_bytes;
        }
        load        = claim(a.key, index);
        load.source = a.source;
        return true;
    }
    return false;
}
