#include "cutoff.h"

#include <numeric>

static bool ends_in_time(const std::vector<double> & n_copies, int n_layers, const spac_draft_times & t) {
    const double end_us = t.n_draft * t.n_layer_draft * t.layer_us;
    double       n_left = 0;
    for (int l = n_layers; l > 0; l--) {
        n_left += n_copies[l - 1];
        if (l * t.per_layer * t.layer_us + n_left * t.copy_us > end_us) {
            return false;
        }
    }
    return true;
}

int spac_cutoff_layer(const std::vector<double> & n_copies, const spac_draft_times & times) {
    if (times.layer_us == 0 || times.copy_us == 0) {
        return times.layer_us > 0;
    }
    for (int n_layers = (int) n_copies.size(); n_layers > 0; n_layers--) {
        const double n = std::accumulate(n_copies.begin(), n_copies.begin() + n_layers, 0.0);
        if (n <= times.n_slots && ends_in_time(n_copies, n_layers, times)) {
            return n_layers;
        }
    }
    return 0;
}
