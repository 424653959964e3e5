// With how many of a context's threads a graph is computed while other programs want the cores, too. The threads wait for each
// other at every node, so one that has lost its core holds up all; how much is lost depends on how the system shares cores
// out. So numbers are tried, and the fastest is kept for a while. No clock and no system here: whoever has them tells.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

struct spac_crowd {
    static constexpr uint64_t WINDOW_US = 100000;

    explicit spac_crowd(int n_most);

    int most() const { return n_most; }

    // a forward of so many tokens took so long, with n_threads()
    void ran(int n_tokens, uint64_t us);

    // a window of at least WINDOW_US is over. share: of the time in which it wanted a core, that in which it had one, of the thread
    // that had least; true: n_threads() is another one now
    bool end_window(double share, uint64_t now_us);

    int    n_threads() const { return n; } // from now on
    bool   is_crowded() const { return is_trying || t_try > 0; }
    double share() const { return last_share; } // of the last window

  private:
    static constexpr uint64_t HOLD_FIRST_US = 2000000, HOLD_LAST_US = 32000000;
    static constexpr int      N_WINDOWS = 2;   // of each number that is tried, and with too small a share until any is
    static constexpr int      N_CALM    = 5;   // with full shares, until the others are gone
    static constexpr int      N_PATIENT = 320; // the same with fewer threads, at most
    static constexpr double   FULL      = 0.9; // of a core, or all but half of what a thread less would leave

    void   try_all();
    void   try_next(uint64_t now_us);
    void   calm_down();
    double take_speed();

    int                 n_most, n;
    double              full;    // a share that is no crowd: a program's own other threads take some, too
    std::vector<int>    numbers; // that are tried, the largest first
    std::vector<double> speeds;  // found so far
    bool                is_trying  = false;
    uint64_t            t_try      = 0; // when to try again; 0: others were not seen
    uint64_t            hold_us    = HOLD_FIRST_US;
    double              kept_speed = 0.0, last_share = 1.0;
    int                 kept    = 0; // number of the last trial
    int                 n_small = 0, n_calm = 0, n_windows = 0, n_patient = N_CALM;

    // Forwards of different widths are compared by the least time that each width ever took: of one token, of 2, 4, 8 ... tokens,
    // per token
    std::array<double, 16> least_us  = {};
    double                 wanted_us = 0.0, spent_us = 0.0; // since the last take_speed()
};
