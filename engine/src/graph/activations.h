// Which experts the tokens of one layer chose, and how often each.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct spac_activations {
    explicit spac_activations(int32_t n_expert_max);

    // ids: [n_expert_used, n_tokens]; those outside [0, n_expert) belong to no expert
    // totals: [n_expert] cumulative counts, to which the first n_tokens_counted tokens are added; O(n_expert_used * n_tokens)
    void count(const ggml_tensor * ids, int64_t n_expert, uint32_t * totals, int64_t n_tokens_counted = INT64_MAX);

    size_t n_distinct() const { return experts.size(); }

    std::vector<int32_t>  experts;       // distinct, in order of appearance
    std::vector<uint32_t> n_rows;        // activations of each
    std::vector<int32_t>  index_of;      // [n_expert_max] into experts, or -1
    size_t                n_counted = 0; // of `experts`, the first ones: those of the tokens that are counted
};

inline int32_t spac_id_at(const ggml_tensor * ids, int64_t iu, int64_t it) {
    return *(const int32_t *) ((const char *) ids->data + iu * ids->nb[0] + it * ids->nb[1]);
}
