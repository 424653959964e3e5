#include "crowd.h"

#include <algorithm>

static constexpr double NEARLY_BEST = 0.97; // fewer threads leave others more
static constexpr double MUCH_SLOWER = 0.6;  // than in its trial: it is time for another one

// all; one less, which is what one other program leaves; and ever fewer
static std::vector<int> numbers_of(int n_most) {
    std::vector<int> numbers = { n_most };
    for (int n = n_most - 1, next = n_most * 3 / 4; n >= 1; n = std::min(n - 1, next), next = n / 2) {
        numbers.push_back(n);
    }
    return numbers;
}

spac_crowd::spac_crowd(int n_most) :
    n_most(n_most), n(n_most), full(std::min(FULL, 1.0 - 0.5 / n_most)), numbers(numbers_of(n_most)) {}

void spac_crowd::ran(int n_tokens, uint64_t us) {
    size_t width = 0;
    while ((2 << width) <= n_tokens && width + 1 < least_us.size()) {
        width++;
    }
    if (us == 0) {
        return;
    }
    double &   least  = least_us[width];
    const bool is_new = least == 0.0; // nothing to compare it with
    least             = is_new ? (double) us / n_tokens : std::min(least, (double) us / n_tokens);
    if (is_new) {
        return;
    }
    wanted_us += least * n_tokens;
    spent_us += us;
}

// as a share of the best ever seen
double spac_crowd::take_speed() {
    const double speed = spent_us > 0.0 ? wanted_us / spent_us : 0.0;
    wanted_us = spent_us = 0.0;
    return speed;
}

bool spac_crowd::end_window(double share, uint64_t now_us) {
    if (n_most < 2) {
        return false;
    }
    const int before = n;
    last_share       = share;
    n_small          = share < full ? n_small + 1 : 0;
    n_calm           = share >= full ? n_calm + 1 : 0;
    n_windows++;
    const bool is_first = is_trying && speeds.empty() && n_windows >= N_WINDOWS;
    if (n == n_most && n_calm >= (is_first ? N_WINDOWS : N_CALM)) {
        calm_down();
    } else if (is_trying && n_windows >= N_WINDOWS) {
        try_next(now_us);
    } else if (!is_trying && t_try == 0 && n_small >= N_WINDOWS) {
        try_all();
    } else if (!is_trying && t_try > 0) {
        const double speed   = take_speed();
        const bool   is_odd  = speed < MUCH_SLOWER * kept_speed && n_windows >= (int) (HOLD_FIRST_US / WINDOW_US);
        const bool   is_free = n_calm >= n_patient; // are the others gone?
        if (now_us >= t_try || is_odd || is_free) {
            n_patient = is_free ? std::min(2 * n_patient, N_PATIENT) : n_patient;
            try_all();
        }
    }
    return n != before;
}

void spac_crowd::calm_down() {
    n         = n_most;
    is_trying = false;
    t_try     = 0;
    hold_us   = HOLD_FIRST_US;
    n_patient = N_CALM;
    n_calm = n_windows = 0;
    take_speed();
}

void spac_crowd::try_all() {
    is_trying = true;
    n_calm = n_windows = 0;
    n                  = numbers[0];
    speeds.clear();
    take_speed();
}

void spac_crowd::try_next(uint64_t now_us) {
    speeds.push_back(take_speed());
    n_calm = n_windows = 0;
    if (speeds.size() < numbers.size()) {
        n = numbers[speeds.size()];
        return;
    }
    kept_speed = *std::max_element(speeds.begin(), speeds.end());
    size_t i   = numbers.size() - 1;
    while (speeds[i] < NEARLY_BEST * kept_speed) {
        i--;
    }
    n         = numbers[i];
    hold_us   = n == kept ? std::min(2 * hold_us, HOLD_LAST_US) : HOLD_FIRST_US;
    kept      = n;
    is_trying = false;
    t_try     = now_us + hold_us;
}
