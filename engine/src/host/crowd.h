// How many of a context's threads compute while other programs want the cores, too. All threads wait for each other at every
// node of a graph, so the slowest sets the speed: as many are used as promise most, the number times the share of a core that
// the last of them gets. No clock and no system: whoever has them tells of one window of time after the other.
#pragma once

#include <cstdint>
#include <vector>

struct spac_crowd {
    static constexpr uint64_t WINDOW_US = 100000;

    explicit spac_crowd(int n_most) :
        n_most(n_most), n(n_most) {}

    int most() const { return n_most; }

    // shares: of each thread that computed in the window, of the time that it wanted a core: in which it had one
    void note(std::vector<double> shares, uint64_t now_us);

    int    n_threads() const { return n; } // from now on
    bool   is_crowded() const { return crowded; }
    double share() const { return least; } // of the thread that had least, in the last window

  private:
    static constexpr uint64_t RETEST_FIRST_US = 1000000, RETEST_LAST_US = 16000000;
    static constexpr int      N_WINDOWS = 4;    // with all threads, until there may be fewer
    static constexpr int      N_CALM    = 5;    // until nobody else is there
    static constexpr double   FULL      = 0.95; // of a core

    void use_all();
    void choose(uint64_t now_us);

    int                 n_most, n;
    bool                crowded = false;
    double              least   = 1.0;
    int                 n_calm = 0, n_seen = 0;
    std::vector<double> sums; // of the windows seen with all threads, from the largest share to the least
    uint64_t            retest_us = RETEST_FIRST_US, t_retest = 0;
};
