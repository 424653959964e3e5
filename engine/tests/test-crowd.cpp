// How many threads compute beside other programs: shares of cores in, a number out, on a clock that the test moves.
#include "check.h"
#include "host/crowd.h"

#include <algorithm>
#include <vector>

// a machine: what each of n threads gets, with a window of time after the other
struct world {
    spac_crowd crowd;
    uint64_t   now = 0;

    explicit world(int n) :
        crowd(n) {}

    // others leave the i-th thread shares[i]; fewer threads are those that have most
    void pass(std::vector<double> shares, int n_windows) {
        std::sort(shares.rbegin(), shares.rend());
        for (int i = 0; i < n_windows; i++) {
            now += spac_crowd::WINDOW_US;
            crowd.note({ shares.begin(), shares.begin() + crowd.n_threads() }, now);
        }
    }
};

static void test_quiet() {
    world w(8);
    w.pass(std::vector<double>(8, 0.99), 100);
    CHECK(w.crowd.n_threads() == 8 && !w.crowd.is_crowded());
}

// as many others as cores: a half of each core is more than all of fewer
static void test_everywhere() {
    for (const int n : { 2, 8 }) {
        world w(n);
        for (int i = 0; i < 200; i++) {
            w.pass(std::vector<double>(n, i % 2 ? 0.45 : 0.55), 1);
            CHECK(w.crowd.n_threads() == n);
        }
        CHECK(w.crowd.is_crowded() && w.crowd.share() == 0.45);
    }
}

// one other program on 8 cores: 7 threads that are not disturbed, until it is gone
static void test_one_core() {
    std::vector<double> shares(8, 1.0);
    shares[3] = 0.5;
    world w(8);
    w.pass(shares, 6);
    CHECK(w.crowd.n_threads() == 7 && w.crowd.is_crowded());
    int n_all = 0;
    for (int i = 0; i < 600; i++) { // a minute
        w.pass(shares, 1);
        n_all += w.crowd.n_threads() == 8;
    }
    CHECK(n_all > 0 && n_all < 60); // it is tried again, ever more rarely
    w.pass(std::vector<double>(8, 1.0), 200);
    CHECK(w.crowd.n_threads() == 8 && !w.crowd.is_crowded());
}

// the others follow to the cores that are left: all threads again
static void test_others_follow() {
    std::vector<double> shares(4, 1.0);
    shares[0] = 0.3;
    world w(4);
    w.pass(shares, 6);
    CHECK(w.crowd.n_threads() == 3);
    w.pass(std::vector<double>(4, 0.5), 1);
    CHECK(w.crowd.n_threads() == 4);
    w.pass(std::vector<double>(4, 0.5), 50);
    CHECK(w.crowd.n_threads() == 4);
}

static void test_odd_windows() {
    world w(4);
    w.crowd.note({}, 1);
    w.crowd.note({ 0.1 }, 2);
    w.crowd.note({ 0.0, 0.0, 0.0, 0.0, 0.0 }, 3);
    CHECK(w.crowd.n_threads() == 4 && !w.crowd.is_crowded());
    w.pass({ 0.0, 0.0, 0.0, 0.0 }, 20);
    CHECK(w.crowd.n_threads() >= 1);
    w.pass({ 1.0, 1.0, 1.0, 1.0 }, 200);
    CHECK(w.crowd.n_threads() == 4 && !w.crowd.is_crowded());

    world one(1);
    one.pass({ 0.1 }, 20);
    CHECK(one.crowd.n_threads() == 1 && !one.crowd.is_crowded());
}

int main() {
    test_quiet();
    test_everywhere();
    test_one_core();
    test_others_follow();
    test_odd_windows();
    return 0;
}
