#include "prompt-way.h"

#include "base/average.h"

#include <algorithm>

// of each way, before they are compared: a device's first batch loads kernels and makes room
static constexpr int    N_FIRST     = 2;
static constexpr double TIME_WEIGHT = 0.3; // of the latest batch: half of what is known is two batches old

int spac_prompt_way::class_of(int64_t n_tokens) {
    int c = 0;
    while (n_tokens > 1 && c + 1 < N_CLASSES) {
        n_tokens /= 2;
        c++;
    }
    return c;
}

void spac_prompt_way::choose(bool is_forced, bool may_stage, int64_t n_tokens) {
    if (is_forced || !may_stage) {
        is_staged = is_forced;
        return;
    }
    width_class &  c     = classes[class_of(n_tokens)];
    const figures &stock = c.of[0], &staged = c.of[1];
    if (staged.n < N_FIRST || stock.n < N_FIRST) {
        is_staged = staged.n < N_FIRST;
        return;
    }
    is_staged           = staged.us_per_token <= stock.us_per_token;
    const double faster = std::min(staged.us_per_token, stock.us_per_token), slower = std::max(staged.us_per_token, stock.us_per_token);
    if ((slower - faster) * n_tokens <= TRIAL_SHARE * c.spent_us) {
        is_staged  = !is_staged;
        c.spent_us = 0;
    }
}

void spac_prompt_way::begin(int64_t n, uint64_t now) {
    begun_us = now;
    n_tokens = n;
}

void spac_prompt_way::note_layer(int il, uint64_t now) {
    if (il != last_il || begun_us == 0) {
        return;
    }
    width_class & c  = classes[class_of(n_tokens)];
    figures &     f  = c.of[is_staged];
    const double  us = (double) (now - begun_us);
    if (f.n++ < N_FIRST) {
        f.us_per_token = us / n_tokens;
    } else {
        spac_blend(f.us_per_token, us / n_tokens, TIME_WEIGHT);
    }
    c.spent_us += us;
    begun_us = 0;
}
