// Loads waiting for the worker: one level per utility, first in first out within a level (MoE-SpAc 3.4).
// Not locked: the expert cache's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

struct spac_prefetch_queue {
    static constexpr int N_LEVELS = 256;

    // key: il * n_expert + ie; the caller keeps keys unique
    void push(uint32_t key, uint8_t level) {
        levels[level].push_back(key);
        n_queued++;
    }

    // highest level first
    bool pop(uint32_t & key) {
        for (int level = N_LEVELS - 1; n_queued > 0 && level >= 0; level--) {
            if (!levels[level].empty()) {
                key = levels[level].front();
                levels[level].pop_front();
                n_queued--;
                return true;
            }
        }
        return false;
    }

    // puts a popped key back at the front of its level
    void push_front(uint32_t key, uint8_t level) {
        levels[level].push_front(key);
        n_queued++;
    }

    // empties the queue, in the order in which pop() would have
    std::vector<uint32_t> drain() {
        std::vector<uint32_t> keys;
        keys.reserve(n_queued);
        for (int level = N_LEVELS - 1; level >= 0; level--) {
            keys.insert(keys.end(), levels[level].begin(), levels[level].end());
            levels[level].clear();
        }
        n_queued = 0;
        return keys;
    }

    bool   empty() const { return n_queued == 0; }
    size_t size() const { return n_queued; }

  private:
    std::deque<uint32_t> levels[N_LEVELS];
    size_t               n_queued = 0;
};
