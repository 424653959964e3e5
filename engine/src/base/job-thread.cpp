#include "job-thread.h"

static constexpr size_t N_JOBS_MAX = 64; // a thread that gets no core must not take memory without end

void spac_job_thread::submit(std::function<void()> job) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (stopped) {
            return;
        }
        if (jobs.size() == N_JOBS_MAX) {
            jobs.pop_front();
        }
        jobs.push_back(std::move(job));
    }
    changed.notify_all();
}

void spac_job_thread::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return stopped || (jobs.empty() && !is_busy); });
}

void spac_job_thread::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
        jobs.clear();
    }
    changed.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void spac_job_thread::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return stopped || !jobs.empty(); });
        if (stopped) {
            return;
        }
        const std::function<void()> job = std::move(jobs.front());
        jobs.pop_front();
        is_busy = true;
        lock.unlock();
        job();
        lock.lock();
        is_busy = false;
        changed.notify_all();
    }
}
