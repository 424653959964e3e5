// Monotonic time in microseconds.
#pragma once

#include <chrono>
#include <cstdint>

inline uint64_t spac_now_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}
