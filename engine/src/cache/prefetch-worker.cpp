#include "prefetch-worker.h"

#include "base/clock.h"

spac_prefetch_worker::spac_prefetch_worker(spac_expert_cache & cache, std::function<bool(const spac_load &)> copy, double copy_gb_s,
                                           std::function<void()> on_idle) :
    cache(cache), copy(std::move(copy)), copy_gb_s(copy_gb_s), on_idle(std::move(on_idle)), thread([this] { run(); }) {}

spac_prefetch_worker::~spac_prefetch_worker() {
    cache.stop();
    thread.join();
}

void spac_prefetch_worker::run() {
    using wait_result = spac_expert_cache::wait_result;

    spac_load load;
    for (wait_result result; (result = cache.wait_for_load(load)) != wait_result::STOPPED;) {
        if (result == wait_result::IDLE) {
            on_idle();
            continue;
        }
        const uint64_t t0 = spac_now_us();
        const bool     ok = copy(load);

        if (copy_gb_s > 0) {
            const uint64_t due = t0 + (uint64_t) (load.bytes / (copy_gb_s * 1e3));
            const uint64_t now = spac_now_us();
            if (now < due) {
                cache.wait_stopped(due - now);
            }
        }
        cache.finish_load(load, ok, spac_now_us() - t0);
    }
}
