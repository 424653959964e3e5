#include "timeline.h"

#include <algorithm>

static constexpr size_t N_SPANS_MAX = 1 << 16; // older ones are dropped

void spac_timeline::add(spac_span_kind kind, int il, uint64_t t_begin_us, uint64_t t_end_us) {
    if (!is_recording || t_end_us <= t_begin_us) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (spans.size() == N_SPANS_MAX) {
        spans.pop_front();
    }
    spans.push_back({ kind, il, t_begin_us, t_end_us });
}

int32_t spac_timeline::take(spac_span * out, int32_t n_max) {
    is_recording = true;
    std::lock_guard<std::mutex> lock(mutex);
    const size_t                n = std::min(spans.size(), (size_t) n_max);
    std::copy_n(spans.begin(), n, out);
    spans.erase(spans.begin(), spans.begin() + n);
    return (int32_t) n;
}
