#include "device-clock.h"

#include <chrono>
#include <thread>

static constexpr double   WEIGHT   = 0.02; // of the latest layer in averages
static constexpr uint64_t EVERY    = 8;    // forwards, of which one is timed where that costs something
static constexpr uint64_t AWAKE_US = 100;  // before its time a thread stops to sleep

void spac_device_clock::see_host(uint64_t us, uint64_t n_bytes) {
    if (n_bytes > 0) {
        spac_blend(host_us, (double) us, WEIGHT);
        spac_blend(host_bytes, (double) n_bytes, WEIGHT);
    }
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
