// How long a device takes for its experts of a layer, seen where collect begins; and how long an emulated one is made to take.
#pragma once

#include "base/average.h"
#include "base/clock.h"
#include "cache/slot-pool.h"
#include "spac.h"

#include <cstdint>

struct spac_device_clock {
    const spac_slot_groups * slots = nullptr; // of devices that may still be at work where collect begins; NULL: they are done
    double                   speed = 0;       // of an emulated device, as a share of the host's; 0: as fast as it is

    // the host took so long for experts of so many bytes
    void see_host(uint64_t us, uint64_t n_bytes);

    // returns when the device is done with n_experts of this layer, which it was given at begin_us
    // forward: counted from 0; false: it was not waited for, which costs a message to another machine in each layer
    bool wait(const spac_moe_layer & layer, uint64_t forward, uint64_t begin_us, uint64_t n_experts) const;

  private:
    double host_us = 0, host_bytes = 0; // averages of a layer
};
