// How the experts that are on a device are shared out between it and the host.
#undef NDEBUG
#include "split/device-clock.h"

#include <cassert>

static const uint64_t BYTES = 1000; // of an expert

// both sides' times of one to four experts; the host takes 100 us for each
static spac_device_clock after(uint64_t device_us, uint64_t device_rest_us = 0) {
    spac_device_clock clock;
    for (uint64_t i = 0; i < 40; i++) {
        const uint64_t n = 1 + i % 4;
        clock.see_host(100 * n, n * BYTES, false);
        clock.see_host(100 * n, n * BYTES, true);
        clock.see_device(device_rest_us + device_us * n, n * BYTES);
    }
    return clock;
}

static void test_not_known() {
    spac_device_clock clock;
    assert(clock.n_on_device(BYTES, 4, 0) == 4);
    for (int i = 0; i < 40; i++) {
        clock.see_device(1000, BYTES);
    }
    assert(clock.n_on_device(BYTES, 4, 0) == 4); // the host was not seen
}

static void test_fast() {
    spac_device_clock clock = after(10, 20);
    assert(clock.n_on_device(BYTES, 4, 0) == 4);
    assert(clock.n_on_device(BYTES, 4, 4) == 4);
    assert(clock.n_on_device(BYTES, 0, 4) == 0);
}

static void test_slow() {
    spac_device_clock clock = after(100);
    assert(clock.n_on_device(BYTES, 4, 0) == 2);
    assert(clock.n_on_device(BYTES, 4, 2) == 3);
    assert(clock.n_on_device(BYTES, 2, 2) == 2);
    clock = after(300);
    assert(clock.n_on_device(BYTES, 4, 0) == 1);
    assert(clock.n_on_device(BYTES, 1, 3) == 1);
}

// a device slower than the host with all the experts: left alone, and tried now and then
static void test_slower_than_the_host_alone() {
    spac_device_clock clock = after(1000);
    int               n     = 0;
    for (int i = 0; i < 1000; i++) {
        n += (int) clock.n_on_device(BYTES, 2, 2);
    }
    assert(n == 1000 / 161);       // each layer takes 400 us, and 64 times 1000 us pass
    for (int i = 0; i < 60; i++) { // what was seen before a trial counts little
        clock.see_device(100, BYTES);
    }
    assert(clock.n_on_device(BYTES, 2, 2) == 2);
}

// alone it has one more thread
static void test_the_host_alone_is_faster() {
    spac_device_clock clock = after(300);
    for (uint64_t i = 0; i < 400; i++) {
        clock.see_host(50 * (1 + i % 4), (1 + i % 4) * BYTES, true);
    }
    assert(clock.n_on_device(BYTES, 4, 0) == 0);
}

// how fast it is alone is tried only where that could be better
static void test_alone_is_not_known() {
    for (const uint64_t device_us : { 10, 300 }) {
        spac_device_clock clock;
        for (uint64_t i = 0; i < 40; i++) {
            clock.see_host(100, BYTES, false);
            clock.see_device(device_us, BYTES);
        }
        assert(clock.n_on_device(BYTES, 4, 0) == (device_us == 10 ? 4 : 0));
    }
}

static void test_a_disturbed_time() {
    spac_device_clock clock = after(100);
    clock.see_host(1000000, BYTES, false);
    assert(clock.n_on_device(BYTES, 4, 0) >= 2);
    for (uint64_t i = 0; i < 200; i++) {
        clock.see_host(100 * (1 + i % 4), (1 + i % 4) * BYTES, false);
    }
    assert(clock.n_on_device(BYTES, 4, 0) == 2);
}

int main() {
    test_not_known();
    test_fast();
    test_slow();
    test_slower_than_the_host_alone();
    test_the_host_alone_is_faster();
    test_alone_is_not_known();
    test_a_disturbed_time();
    return 0;
}
