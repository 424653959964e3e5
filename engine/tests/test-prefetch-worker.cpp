// Races between graph, scheduler and worker, on a slow, a failing and a cancelled device. Run under TSan too.
#include "cache/prefetch-worker.h"
#include "check.h"

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

using std::chrono::microseconds;

// a device whose slots hold words, written one after the other
struct fake_device {
    static constexpr int N_WORDS = 64;

    std::vector<uint32_t> memory;
    const uint32_t        n_expert;
    const int             delay_us;
    const int             fail_every; // 0: never
    int                   n_copies = 0;

    fake_device(int n_slots, uint32_t n_expert, int delay_us, int fail_every = 0) :
        memory(n_slots * N_WORDS), n_expert(n_expert), delay_us(delay_us), fail_every(fail_every) {}

    bool copy(const spac_load & load) {
        for (int i = 0; i < N_WORDS; i++) {
            memory[load.slot * N_WORDS + i] = load.il * n_expert + load.ie + 1;
            if (i == N_WORDS / 2 && delay_us > 0) {
                std::this_thread::sleep_for(microseconds(delay_us));
            }
        }
        return fail_every == 0 || ++n_copies % fail_every != 0;
    }

    bool holds(int32_t slot, uint32_t key) const {
        for (int i = 0; i < N_WORDS; i++) {
            if (memory[slot * N_WORDS + i] != key + 1) {
                return false;
            }
        }
        return true;
    }
};

// decisions, forwards and copies at once; every expert that the graph is given must be whole
static void run_race(int delay_us, int fail_every, bool cancels) {
    constexpr uint32_t N_LAYER = 4, N_EXPERT = 16;
    constexpr int      N_SLOTS = 12;

    cache_fixture     f(N_LAYER, N_EXPERT, N_SLOTS);
    fake_device       device(N_SLOTS, N_EXPERT, delay_us, fail_every);
    std::atomic<bool> stop{ false };
    {
        spac_prefetch_worker worker(f.cache, [&](const spac_load & load) { return device.copy(load); }, 0);

        std::thread scheduler([&] {
            std::mt19937          rng(1);
            std::vector<uint8_t>  utility(N_LAYER * N_EXPERT), tau(N_LAYER);
            std::vector<uint32_t> loads(N_LAYER * N_EXPERT);
            while (!stop) {
                for (auto & u : utility) {
                    u = rng() % 6;
                }
                for (auto & t : tau) {
                    t = 1 + rng() % 4;
                }
                for (auto & l : loads) {
                    l = rng() % (N_LAYER * N_EXPERT);
                }
                f.cache.apply(utility.data(), tau.data(), loads.data(), loads.size(), rng() % 2 ? UINT64_MAX : 300);
                if (cancels && rng() % 4 == 0) {
                    f.cache.cancel();
                }
                std::this_thread::sleep_for(microseconds(200));
            }
        });

        std::mt19937 rng(2);
        uint64_t     n_seen = 0;
        for (int forward = 0; forward < 400; forward++) {
            f.cache.begin_forward();
            for (uint32_t il = 0; il < N_LAYER; il++) {
                f.cache.unpin_all();
                for (int i = 0; i < 4; i++) {
                    const uint32_t ie   = (i * 4 + rng() % 4) % N_EXPERT;
                    const int32_t  slot = f.pin(il, ie);
                    if (slot >= 0) {
                        CHECK(device.holds(slot, f.key(il, ie)));
                        n_seen++;
                    }
                }
                std::this_thread::sleep_for(microseconds(20));
            }
            f.cache.unpin_all();
            if (forward % 50 == 0) {
                f.cache.check();
            }
        }
        stop = true;
        scheduler.join();
        CHECK(n_seen > 0);
    } // shutdown with loads waiting and in flight
    f.cache.check();
    CHECK(f.counters.n_pinned_steals == 0);
    CHECK(f.counters.n_hit + f.counters.n_miss + f.counters.n_late == 400 * N_LAYER * 4);
    CHECK(fail_every == 0 || f.counters.n_load_failures > 0);
    CHECK(f.counters.n_loads > 0);
}

// Layers that become whole and split again, while others fill free slots and pass through. A graph that was begun goes on
// until the next but one begins: what it reads stays for so long.
static void run_whole_race(int delay_us, int fail_every) {
    constexpr uint32_t N_LAYER = 4, N_EXPERT = 4;
    constexpr int      N_SLOTS = 11;

    cache_fixture     f(N_LAYER, N_EXPERT, N_SLOTS);
    fake_device       device(N_SLOTS, N_EXPERT, delay_us, fail_every);
    std::atomic<bool> stop{ false };
    size_t            n_whole = 0, n_changes = 0;
    {
        spac_prefetch_worker worker(f.cache, [&](const spac_load & load) { return device.copy(load); }, 0);

        std::thread scheduler([&] {
            std::mt19937          rng(3);
            std::vector<uint8_t>  utility(N_LAYER * N_EXPERT), tau(N_LAYER), whole(N_LAYER);
            std::vector<uint32_t> loads(N_LAYER * N_EXPERT);
            for (int i = 0; !stop; i++) {
                for (auto & u : utility) {
                    u = rng() % 6;
                }
                for (auto & t : tau) {
                    t = 1 + rng() % 4;
                }
                for (auto & l : loads) {
                    l = rng() % (N_LAYER * N_EXPERT);
                }
                for (auto & w : whole) {
                    w = i % 10 == 0 ? rng() % 2 : w;
                }
                f.cache.apply(utility.data(), tau.data(), loads.data(), loads.size(), rng() % 2 ? UINT64_MAX : 300);
                f.whole.want(whole.data());
                std::this_thread::sleep_for(microseconds(500));
            }
        });

        const auto check_graph = [&](const std::vector<int32_t> & first) {
            for (uint32_t key = 0; key < N_LAYER * N_EXPERT; key++) {
                const int32_t slot = first[key / N_EXPERT];
                CHECK(slot < 0 || device.holds(slot + (int32_t) (key % N_EXPERT), key));
                n_whole += slot >= 0;
            }
        };
        std::mt19937         rng(4);
        std::vector<int32_t> now(N_LAYER, -1), before(N_LAYER, -1);
        for (uint64_t forward = 0, version = 0; forward < 600; forward++) {
            before = now;
            if (f.whole.version() != version) {
                now = f.whole.first_slots(version);
                n_changes++;
            }
            const bool is_wide = forward % 7 == 0;
            f.whole.enter_graph(now, !is_wide);
            f.cache.begin_forward();
            for (uint32_t il = 0; il < N_LAYER; il++) {
                f.cache.unpin_all();
                if (now[il] >= 0) {
                    continue;
                }
                const int32_t  used[] = { (int32_t) (rng() % 2), 2 + (int32_t) (rng() % 2) };
                const uint32_t rows[] = { 1, 1 };
                int32_t        slots[2];
                if (is_wide && f.staged.can_stage()) {
                    f.staged.stage(il, used, 2);
                    f.staged.pin(il, used, 2, slots);
                } else {
                    f.cache.pin(il, used, rows, 2, slots);
                    f.cache.fill(il, used, rows, 2, 0, SIZE_MAX);
                }
                for (int i = 0; i < 2; i++) {
                    CHECK(slots[i] < 0 || device.holds(slots[i], f.key(il, used[i])));
                }
                check_graph(before);
                std::this_thread::sleep_for(microseconds(50));
            }
            check_graph(now);
            if (forward % 50 == 0) {
                f.cache.check();
            }
        }
        stop = true;
        scheduler.join();
    }
    f.cache.check();
    CHECK(f.counters.n_pinned_steals == 0);
    CHECK(n_changes > 0 && (n_whole > 0 || fail_every > 0));
}

// a device that always fails: nothing becomes resident, nothing hangs
static void test_dead_device() {
    cache_fixture f(1, 4, 2);
    f.utility = { 1, 1, 1, 1 };
    f.apply({ 0, 1, 2, 3 });
    spac_prefetch_worker worker(f.cache, [](const spac_load &) { return false; }, 0);
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.counters.n_load_failures == 4 && f.counters.n_loads == 0);
    CHECK(f.residency == std::vector<uint8_t>(4, SPAC_RESIDENCY_ABSENT));
    f.cache.check();
}

// an expert whose copy is in flight counts as late, and runs on the host
static void test_late() {
    cache_fixture f(1, 2, 1);
    f.utility = { 1, 0 };
    std::atomic<bool>    go{ false }, begun{ false };
    spac_prefetch_worker worker(f.cache, [&](const spac_load &) {
        begun = true;
        while (!go) {
            std::this_thread::yield();
        }
        return true; }, 0);
    f.apply({ 0 });
    while (!begun) {
        std::this_thread::yield();
    }
    CHECK(f.pin(0, 0) == -1 && f.counters.n_late == 1);
    CHECK(!f.cache.wait_idle(1));
    go = true;
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.pin(0, 0) == 0 && f.counters.n_hit == 1);
}

// 100 bytes at 1e-5 GB/s take 10 ms
static void test_throttle() {
    cache_fixture f(1, 2, 1);
    f.utility = { 1, 0 };
    spac_prefetch_worker worker(f.cache, [](const spac_load &) { return true; }, 1e-5);
    f.apply({ 0 });
    CHECK(f.cache.wait_idle(5000));
    CHECK(f.counters.load_us >= 10000);
}

int main() {
    run_whole_race(0, 0);
    run_whole_race(200, 0);
    run_whole_race(20, 7);
    run_race(0, 0, false);
    run_race(300, 0, false);
    run_race(100, 3, false);
    run_race(100, 0, true);
    test_dead_device();
    test_late();
    test_throttle();
    return 0;
}
