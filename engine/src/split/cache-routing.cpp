#include "cache-routing.h"

#include "base/best-first.h"

#include <algorithm>
#include <cmath>

void spac_cache_routing::learn(const float * logits, int64_t n_expert) {
    const auto range = std::minmax_element(logits, logits + n_expert);
    delta += ((double) *range.second - *range.first - delta) / ++n_seen;
}

void spac_cache_routing::choose(const float * logits, const std::vector<uint8_t> & is_there, const int32_t * wanted, int64_t n_used, int32_t * chosen) {
    const int32_t n_expert = (int32_t) is_there.size();
    std::copy(wanted, wanted + n_used, chosen);
    const double bonus = strength * delta;
    if (!(bonus > 0) || std::all_of(wanted, wanted + n_used, [&](int32_t ie) { return is_there[ie]; })) {
        return;
    }
    biased.resize(n_expert);
    for (int32_t ie = 0; ie < n_expert; ie++) {
        biased[ie] = logits[ie] + (is_there[ie] ? bonus : 0);
    }
    spac_best_first(biased, n_used, order);
    const auto is_wanted = [&](int32_t ie) { return std::find(wanted, wanted + n_used, ie) != wanted + n_used; };
    if (!std::all_of(order.begin(), order.begin() + n_used, is_wanted)) { // else the order stays, and with it how sums round
        std::copy(order.begin(), order.begin() + n_used, chosen);
    }
}

double spac_cache_routing::share_kept(const float * logits, const int32_t * wanted, const int32_t * chosen, int64_t n_used) {
    double best = logits[wanted[0]];
    for (int64_t i = 1; i < n_used; i++) {
        best = std::max(best, (double) logits[wanted[i]]);
    }
    double of_wanted = 0, of_chosen = 0;
    for (int64_t i = 0; i < n_used; i++) {
        of_wanted += std::exp(logits[wanted[i]] - best);
        of_chosen += std::exp(logits[chosen[i]] - best);
    }
    return std::min(1.0, of_chosen / of_wanted);
}
