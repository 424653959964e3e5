// How many threads compute beside other programs: speeds and shares of cores in, a number out, on a clock that the test moves.
#include "check.h"
#include "host/crowd.h"

#include <algorithm>
#include <functional>

// a machine: `speed` of so many threads, `share` of a core that the one with the least of them gets
struct world {
    typedef std::function<double(int n)> by_number;

    spac_crowd crowd;
    uint64_t   now        = 0;
    int        n_switches = 0;

    explicit world(int n) :
        crowd(n) {}

    // forwards of one and of 5 tokens, which take 1 and 2 ms at full speed
    void pass(int n_windows, const by_number & speed, const by_number & share) {
        for (int i = 0; i < n_windows; i++) {
            const int n = crowd.n_threads();
            for (uint64_t t = 0; t < spac_crowd::WINDOW_US;) {
                const int  n_tokens = t % 2 == 0 ? 1 : 5;
                const auto us       = (uint64_t) ((n_tokens == 1 ? 1000 : 2000) / speed(n)) | 1;
                crowd.ran(n_tokens, us);
                t += us;
                now += us;
            }
            n_switches += crowd.end_window(share(n), now);
        }
    }

    // there are no other programs
    void quiet(int n_windows) {
        pass(n_windows, [&](int n) { return (double) n / crowd.most(); }, [](int) { return 0.99; });
    }
};

static void test_quiet() {
    for (const int n : { 1, 2, 8, 64 }) {
        world w(n);
        w.quiet(1000);
        CHECK(w.crowd.n_threads() == n && !w.crowd.is_crowded() && w.n_switches == 0);
    }
}

// half of each core: all threads are the fastest still
static void test_all_are_best() {
    world w(2);
    w.quiet(10);
    w.pass(600, [](int n) { return n == 2 ? 0.45 : 0.3; }, [](int n) { return n == 2 ? 0.5 : 0.66; });
    CHECK(w.crowd.is_crowded() && w.crowd.n_threads() == 2);
    CHECK(w.n_switches > 0 && w.n_switches < 20); // one is tried, ever more rarely: it is a minute
    w.quiet(10);
    CHECK(!w.crowd.is_crowded() && w.crowd.n_threads() == 2);
}

// they wait for each other most of the time: one thread is the fastest, until the others are gone
static void test_one_is_best() {
    world w(2);
    w.quiet(10);
    const auto speed = [](int n) { return n == 2 ? 0.15 : 0.4; };
    w.pass(6, speed, [](int n) { return n == 2 ? 0.33 : 0.66; });
    CHECK(w.crowd.is_crowded() && w.crowd.n_threads() == 1);
    int n_all = 0;
    for (int i = 0; i < 600; i++) {
        w.pass(1, speed, [](int n) { return n == 2 ? 0.33 : 0.66; });
        n_all += w.crowd.n_threads() == 2;
    }
    CHECK(n_all > 0 && n_all < 60);
    w.quiet(400); // it finds out at its next trial
    CHECK(!w.crowd.is_crowded() && w.crowd.n_threads() == 2);
}

// one other program on 8 cores: 7 threads that are not disturbed
static void test_one_less() {
    world w(8);
    w.quiet(10);
    w.pass(60, [](int n) { return n == 8 ? 0.5 : n / 8.0; }, [](int n) { return n == 8 ? 0.5 : 1.0; });
    CHECK(w.crowd.is_crowded() && w.crowd.n_threads() == 7);
    // more come: it is noticed before the next trial is due
    w.pass(60, [](int n) { return n > 4 ? 0.1 : n / 8.0; }, [](int n) { return n > 4 ? 0.3 : 1.0; });
    CHECK(w.crowd.n_threads() == 3);
}

static void test_odd_input() {
    world w(4);
    w.crowd.ran(1, 0);
    w.crowd.ran(0, 10);
    w.crowd.ran(2000000000, UINT64_MAX);
    for (int i = 0; i < 1000; i++) { // nothing is known of any speed
        w.crowd.end_window(0.0, i);
        CHECK(w.crowd.n_threads() >= 1 && w.crowd.n_threads() <= 4);
    }
    w.quiet(600);
    CHECK(w.crowd.n_threads() == 4 && !w.crowd.is_crowded());
}

int main() {
    test_quiet();
    test_all_are_best();
    test_one_is_best();
    test_one_less();
    test_odd_input();
    return 0;
}
