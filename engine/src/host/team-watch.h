// Watches the threads that compute a context's graphs without a device: how much of a core each gets, and where. Other
// programs may want the cores; two of the threads may then share one for long, as the system sees no core with more to do than
// another: one of them is moved.
#pragma once

#include "crowd.h"

#include <cstdint>
#include <vector>

struct spac_team_watch {
    explicit spac_team_watch(int n_most) :
        crowd(n_most) {}

    // how many threads a graph of so many tokens is to have, of n_most; asked on the thread that computes it, before it does
    int n_threads(int n_most, int n_tokens);

    const spac_crowd & seen() const { return crowd; }
    uint64_t           n_moves() const { return moves; }

  private:
    struct times {
        uint64_t run_ns = 0, wait_ns = 0; // on a core; ready to run, and another program was there
    };

    void   note_forward(uint64_t now_us);
    void   begin(uint64_t now_us);
    void   end_window(uint64_t now_us);
    bool   read_times(std::vector<times> & out) const;
    double least_share(const std::vector<times> & after) const;
    void   spread();

    spac_crowd         crowd;
    std::vector<int>   team; // the threads' ids; the first is the one that asks; empty: none is watched
    std::vector<times> before;
    uint64_t           t_window = 0, t_spread = 0; // when to look again
    uint64_t           moves       = 0;
    uint64_t           t_forward   = 0; // when the last one began
    int                last_tokens = 0;
};
