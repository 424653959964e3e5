// Times the device's and the host's experts of each layer (the device's where collect begins). From these: how many of a layer's
// residents the device computes, so that both sides end together. Also makes an emulated device as slow as it shall be.
#pragma once

#include "base/average.h"
#include "base/clock.h"
#include "base/line-fit.h"
#include "cache/slot-pool.h"
#include "spac.h"

#include <cstdint>

struct spac_device_clock {
    const spac_slot_groups * slots = nullptr; // of devices that may still be at work where collect begins; NULL: they are done
    double                   speed = 0;       // of an emulated device, as a share of the host's; 0: as fast as it is

    // the host, or the device, took so long for experts of so many bytes
    // is_alone: the device had none, so that the thread that waits for it helped the host all the time
    void see_host(uint64_t us, uint64_t n_bytes, bool is_alone);
    void see_device(uint64_t us, uint64_t n_bytes);

    // How many of the n_resident experts that a layer finds on its device are computed there, beside the host with n_absent others:
    // as many as end soonest, but all if that gains little, and until both sides' times are known
    size_t n_on_device(uint64_t expert_bytes, size_t n_resident, size_t n_absent);

    // returns when the device is done with n_experts of this layer, which it was given at begin_us
    // forward: counted from 0; false: it was not waited for, which costs a message to another machine in each layer
    bool wait(const spac_moe_layer & layer, uint64_t forward, uint64_t begin_us, uint64_t n_experts) const;

  private:
    double        host_us = 0, host_bytes = 0; // averages of a layer
    spac_line_fit beside, alone, device;       // us by bytes: the host's beside the device, and alone; the device's
    double        idle_us = 0;                 // of layers that the host computed alone since the device computed last
};
