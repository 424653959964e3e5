// The one thread that copies experts to the device.
#pragma once

#include "expert-cache.h"

#include <functional>
#include <thread>

struct spac_prefetch_worker {
    // copy: moves one expert into its slot and returns when it is there; false if the device failed
    // copy_gb_s: 0, or the speed of an emulated link (10^9 bytes per second)
    // on_idle: called on the worker's thread, now and then, while there is nothing to copy
    spac_prefetch_worker(spac_expert_cache & cache, std::function<bool(const spac_load &)> copy, double copy_gb_s, std::function<void()> on_idle = [] {});
    ~spac_prefetch_worker(); // a copy in flight completes

  private:
    void run();

    spac_expert_cache &                          cache;
    const std::function<bool(const spac_load &)> copy;
    const double                                 copy_gb_s;
    const std::function<void()>                  on_idle;
    std::thread                                  thread;
};
