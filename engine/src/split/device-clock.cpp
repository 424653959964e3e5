#include "device-clock.h"

#include <algorithm>
#include <chrono>
#include <thread>

static constexpr double   WEIGHT   = 0.02; // of the latest layer in averages
static constexpr uint64_t EVERY    = 8;    // forwards, of which one is timed where that costs something
static constexpr uint64_t AWAKE_US = 100;  // before the end of a wait, in which a thread no longer sleeps
static constexpr double   GAIN     = 0.95; // the host takes over residents if a layer then takes at most so much of the time
static constexpr double   HELP     = 0.5;  // assumed until seen: the host's time with the thread that else waits for the device, over that without
static constexpr double   RETRY    = 64;   // a device without work gets an expert after so many times an expert's time

void spac_device_clock::see_host(uint64_t us, uint64_t n_bytes, bool is_alone) {
    if (n_bytes > 0) {
        spac_blend(host_us, (double) us, WEIGHT);
        spac_blend(host_bytes, (double) n_bytes, WEIGHT);
        (is_alone ? alone : beside).add(n_bytes, us);
    }
}

void spac_device_clock::see_device(uint64_t us, uint64_t n_bytes) {
    if (n_bytes > 0) {
        device.add(n_bytes, us);
    }
}

size_t spac_device_clock::n_on_device(uint64_t expert_bytes, size_t n_resident, size_t n_absent) {
    if (!beside.is_known() || !device.is_known() || n_resident == 0) {
        return n_resident;
    }
    const auto longer = [&](size_t n) {
        const double bytes    = (n_resident + n_absent - n) * expert_bytes;
        const double alone_us = alone.is_known() ? alone.at(bytes) : HELP * beside.at(bytes);
        return n == 0 ? alone_us : std::max(device.at(n * expert_bytes), beside.at(bytes));
    };
    size_t best = n_resident;
    for (size_t n = n_resident; n-- > 0;) {
        best = longer(n) < longer(best) ? n : best;
    }
    if (longer(best) > GAIN * longer(n_resident)) {
        best = n_resident;
    }
    idle_us = best > 0 ? 0 : idle_us + longer(0);
    if (idle_us > RETRY * device.at(expert_bytes)) { // it may be faster by now
        idle_us = 0;
        device.forget();
        return 1;
    }
    return best;
}

static void wait_until(uint64_t end_us) {
    for (uint64_t now = spac_now_us(); now < end_us; now = spac_now_us()) {
        if (end_us - now > AWAKE_US) {
            std::this_thread::sleep_for(std::chrono::microseconds(end_us - now - AWAKE_US));
        }
    }
}

bool spac_device_clock::wait(const spac_moe_layer & layer, uint64_t forward, uint64_t begin_us, uint64_t n_experts) const {
    if (slots) {
        if (forward % EVERY != 0) {
            return false;
        }
        // whoever computes in order answers only when it has computed
        int32_t any = 0;
        ggml_backend_tensor_get((*slots)[layer.group]->parts[SPAC_PART_DOWN], &any, 0, sizeof(any));
    } else if (speed > 0 && host_bytes > 0) {
        wait_until(begin_us + (uint64_t) (n_experts * layer.expert_bytes() * (host_us / host_bytes) / speed));
    }
    return true;
}
