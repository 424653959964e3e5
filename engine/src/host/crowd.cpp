#include "crowd.h"

#include <algorithm>
#include <functional>

static constexpr double NEARLY_BEST = 0.95; // fewer threads wait for each other less
static constexpr double NO_BETTER   = 0.7;  // of a core: fewer threads are not left alone either

void spac_crowd::use_all() {
    n      = n_most;
    n_seen = 0;
    sums.assign(n_most, 0.0);
}

void spac_crowd::note(std::vector<double> shares, uint64_t now_us) {
    if ((int) shares.size() != n || n_most < 2) {
        return;
    }
    std::sort(shares.begin(), shares.end(), std::greater<double>());
    least   = shares.back();
    n_calm  = least >= FULL ? n_calm + 1 : 0;
    crowded = crowded || n_calm == 0;
    if (n < n_most) {
        if (now_us >= t_retest || least < NO_BETTER) {
            use_all();
        }
        return;
    }
    if (n_calm >= N_CALM) {
        crowded   = false;
        retest_us = RETEST_FIRST_US;
    }
    if (!crowded) {
        use_all();
        return;
    }
    sums.resize(n_most);
    for (int i = 0; i < n_most; i++) {
        sums[i] += shares[i];
    }
    if (++n_seen == N_WINDOWS) {
        choose(now_us);
    }
}

void spac_crowd::choose(uint64_t now_us) {
    double best = 0.0;
    for (int i = 0; i < n_most; i++) {
        best = std::max(best, (i + 1) * sums[i]);
    }
    int k = 1;
    while (k * sums[k - 1] < NEARLY_BEST * best) {
        k++;
    }
    use_all();
    if (k < n_most) {
        n         = k;
        t_retest  = now_us + retest_us;
        retest_us = std::min(2 * retest_us, RETEST_LAST_US);
    }
}
