// SP-MoE's cutoff layer (section 3.2): for how many layers, from the first on, experts are copied while the draft model runs.
#pragma once

#include <vector>

struct spac_draft_times {
    double n_draft       = 0; // forwards of the draft model between two of the target
    double layer_us      = 0; // of one layer of the draft model; 0: not known
    double copy_us       = 0; // of one expert; 0: not known
    double n_layer_draft = 0;
    double n_slots       = 0; // of the device
    double per_layer     = 1; // layers of the draft model to one of the target
};

// n_copies: of each layer; the largest L whose experts fit the device, and for each of whose layers l, from 1 on,
//   l * per_layer * layer_us + (n_l + ... + n_L) * copy_us <= n_draft * n_layer_draft * layer_us
// 1 until a copy was measured, which has to begin somewhere; 0 until a forward was
int spac_cutoff_layer(const std::vector<double> & n_copies, const spac_draft_times & times);
