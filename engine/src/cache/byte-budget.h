// How many bytes may be copied per forward, as the scheduler grants. Not locked: the slot table's mutex guards it.
#pragma once

#include <algorithm>
#include <cstdint>

struct spac_byte_budget {
    static constexpr uint64_t NONE = UINT64_MAX; // no limit

    void set(uint64_t bytes) {
        per_forward = bytes;
        if (bytes == NONE) {
            left = NONE;
        } else if (left == NONE) {
            left = bytes;
        }
    }

    // for another forward; what is left over may be saved up, so that an expert larger than the budget still loads now and then
    void renew(uint64_t largest_expert) {
        if (per_forward != NONE) {
            left = std::min(left + per_forward, per_forward + largest_expert);
        }
    }

    bool has_limit() const { return left != NONE; }

    bool has(uint64_t bytes) const { return left >= bytes; }

    void spend(uint64_t bytes) { left -= has_limit() ? bytes : 0; }

    uint64_t left = NONE; // in this forward

  private:
    uint64_t per_forward = NONE;
};
