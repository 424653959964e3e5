// When the parties of a split were at work: spans of time, kept from when they are first asked for.
#pragma once

#include "spac.h"

#include <atomic>
#include <deque>
#include <mutex>

struct spac_timeline {
    void add(spac_span_kind kind, int il, uint64_t t_begin_us, uint64_t t_end_us);

    // moves up to n_max spans, the oldest first
    int32_t take(spac_span * spans, int32_t n_max);

  private:
    std::atomic<bool>     is_recording{ false }; // from the first take() on
    std::mutex            mutex;                 // guards the spans
    std::deque<spac_span> spans;
};
