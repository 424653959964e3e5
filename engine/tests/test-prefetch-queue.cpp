#include "cache/prefetch-queue.h"
#include "check.h"

// pushed: a at 1, b at 3, c at 1, d at 3; highest level first, first in first out within: b d a c
static void test_order() {
    spac_prefetch_queue queue;
    queue.push(10, 1);
    queue.push(11, 3);
    queue.push(12, 1);
    queue.push(13, 3);
    CHECK(!queue.empty());
    CHECK((queue.drain() == std::vector<uint32_t>{ 11, 13, 10, 12 }));
    CHECK(queue.empty());
}

static void test_push_front() {
    spac_prefetch_queue queue;
    queue.push(1, 5);
    queue.push(2, 5);
    uint32_t key = 0;
    CHECK(queue.pop(key) && key == 1);
    queue.push_front(key, 5);
    CHECK((queue.drain() == std::vector<uint32_t>{ 1, 2 }));
    CHECK(!queue.pop(key));
}

int main() {
    test_order();
    test_push_front();
    return 0;
}
