// What attaching decides before it takes memory for good: the device, who computes the host's experts, and how many slots.
#pragma once

#include "engine-params.h"
#include "host/kernels.h"
#include "layers.h"

#include "ggml-backend.h"

#include <cstdint>
#include <vector>

struct spac_plan {
    ggml_backend_dev_t   device    = nullptr;
    bool                 has_slots = true; // false: there is no device, and `device` is the CPU
    int                  host_mode = SPAC_HOST_IN_GRAPH;
    const spac_kernels * kernels   = nullptr; // NULL: ggml's
    std::vector<int32_t> group_slots;         // of each layout group
    int32_t              n_layer_unpinned = 0;

    bool has_executor() const { return host_mode == SPAC_HOST_EXECUTOR || host_mode == SPAC_HOST_IN_STREAM; }

    bool device_is_cpu() const { return spac_device_is_cpu(device); }
};

// sets what of the layers attaching decides: who computes their host experts, their groups, and which are declined after
// all, as without a device there are no kernels for them
// throws if the settings do not fit together, there is nothing to split for the device, or it computes wrongly
spac_plan spac_make_plan(const spac_settings & settings, spac_layers & layers);
