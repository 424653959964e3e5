// The largest of some scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

// order: [scores.size()] indices, of which the first n are those of the largest scores, from the largest on; of equal ones the lowest first
template <typename T>
void spac_best_first(const std::vector<T> & scores, int64_t n, std::vector<int32_t> & order) {
    order.resize(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + n, order.end(),
                      [&](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
}
