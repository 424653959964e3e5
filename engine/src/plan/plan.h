// What attaching decides before it takes memory for good: the device, who computes the host's experts, and how many slots.
#pragma once

#include "base/engine-params.h"
#include "host/kernels.h"
#include "layers/layers.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdint>
#include <vector>

struct spac_plan {
    std::vector<ggml_backend_dev_t> devices;          // with slots, each for the experts of its own layers
    std::vector<size_t>             places;           // of each device, among those that were asked for
    bool                            has_slots = true; // false: there is no device, and `devices` has only the CPU
    int                             host_mode = SPAC_HOST_IN_GRAPH;
    double                          speed     = 0;       // of an emulated device beside the host, as a share of the host's; 0: they take turns
    const spac_kernels *            kernels   = nullptr; // NULL: ggml's
    std::vector<int32_t>            group_slots;         // of each layout group
    int32_t                         n_layer_unpinned = 0;

    bool has_executor() const { return host_mode == SPAC_HOST_EXECUTOR || host_mode == SPAC_HOST_IN_STREAM; }

    // of all devices, of any; there is one CPU at most
    bool device_is_cpu() const { return std::all_of(devices.begin(), devices.end(), spac_device_is_cpu); }

    bool any_is_cpu() const { return std::any_of(devices.begin(), devices.end(), spac_device_is_cpu); }

    ggml_backend_dev_t device_of(const spac_moe_layer & layer) const { return devices[layer.device]; }
};

// sets what of the layers attaching decides: who computes their host experts, their groups, and which are declined after
// all, as without a device there are no kernels for them
// throws if the settings do not fit together, there is nothing to split for the device, or it computes wrongly
spac_plan spac_make_plan(const spac_settings & settings, spac_layers & layers);
