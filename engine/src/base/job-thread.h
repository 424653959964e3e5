// A thread that works off jobs in the order in which they come.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

struct spac_job_thread {
    spac_job_thread() :
        thread([this] { run(); }) {}
    ~spac_job_thread() { stop(); }

    void submit(std::function<void()> job); // none throws; of too many that wait, the oldest are dropped
    void wait_idle();                       // until all are done
    void stop();                            // those that wait are dropped, as are all that come later

  private:
    void run();

    std::mutex                        mutex; // guards the fields below
    std::condition_variable           changed;
    std::deque<std::function<void()>> jobs;
    bool                              is_busy = false, stopped = false;

    std::thread thread;
};
