#include "disk-reader.h"

#include "base/clock.h"
#include "base/status.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

static void drop_pages(int fd, const spac_disk_read & r) {
#ifdef POSIX_FADV_DONTNEED
    posix_fadvise(fd, (off_t) r.offset, (off_t) r.bytes, POSIX_FADV_DONTNEED);
#else
    (void) fd, (void) r;
#endif
}

static long read_file(int fd, void * data, size_t bytes, uint64_t offset) {
    return pread(fd, data, bytes, (off_t) offset);
}

spac_disk_reader::spac_disk_reader(std::function<void(const spac_disk_read &, int)> on_done, bool drops_pages, read_fn read, size_t alignment) :
    on_done(std::move(on_done)), drops_pages(drops_pages), read(read ? std::move(read) : read_file), alignment(alignment) {
    static constexpr int N_THREADS = DEPTH + N_URGENT;
    threads.reserve(N_THREADS);
    try {
        while (threads.size() < N_THREADS) {
            threads.emplace_back([this] { run(); });
        }
    } catch (const std::system_error & e) { // the system has no thread left
        if (threads.empty()) {
            throw;
        }
        spac_log("%zu of %d threads read experts, the system has no more (%s): reading may be slower", threads.size(), N_THREADS, e.what());
        std::lock_guard<std::mutex> lock(mutex);
        depth = std::max(1, (int) threads.size() - N_URGENT);
    }
}

spac_disk_reader::~spac_disk_reader() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
        urgent.clear();
        background.clear();
    }
    changed.notify_all();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

void spac_disk_reader::submit(const spac_disk_read & read, bool is_urgent) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        (is_urgent ? urgent : background).push_back(read);
    }
    changed.notify_one();
}

void spac_disk_reader::hurry(int32_t slot) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  is_other = [slot](const spac_disk_read & read) { return read.slot != slot; };
    const auto                  first    = std::stable_partition(background.begin(), background.end(), is_other);
    urgent.insert(urgent.end(), first, background.end());
    background.erase(first, background.end());
    changed.notify_all(); // threads that background reads do not get
}

bool spac_disk_reader::drop(int32_t slot, size_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  is_its = [slot](const spac_disk_read & read) { return read.slot == slot; };
    if ((size_t) std::count_if(background.begin(), background.end(), is_its) != n) {
        return false;
    }
    background.erase(std::remove_if(background.begin(), background.end(), is_its), background.end());
    return true;
}

spac_disk_stats spac_disk_reader::stats() const {
    std::lock_guard<std::mutex> lock(mutex);
    return total;
}

// ---- on the threads

void spac_disk_reader::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return stopped || can_begin(); });
        if (stopped) {
            return;
        }
        const bool                   is_urgent = !urgent.empty();
        std::deque<spac_disk_read> & queue     = is_urgent ? urgent : background;
        const spac_disk_read         next      = queue.front();
        queue.pop_front();
        begin_read(is_urgent);
        lock.unlock();

        const uint64_t t0    = spac_now_us();
        const int      error = read_all(next);
        const uint64_t t1    = spac_now_us();

        lock.lock();
        end_read(next, is_urgent, t0, t1);
        lock.unlock();
        on_done(next, error); // who waits for it finds it counted
        lock.lock();
    }
}

void spac_disk_reader::begin_read(bool is_urgent) {
    n_background += !is_urgent;
    if (n_reading++ == 0) {
        busy_since = spac_now_us();
    }
}

void spac_disk_reader::end_read(const spac_disk_read & read, bool is_urgent, uint64_t t0, uint64_t t1) {
    n_background -= !is_urgent;
    total.n_reads++;
    total.bytes += read.bytes;
    total.read_us += t1 - t0;
    if (--n_reading == 0) {
        total.busy_us += std::max(t1, busy_since) - busy_since;
    }
}

int spac_disk_reader::read_all(const spac_disk_read & r) {
    size_t n_done       = 0;
    bool   was_rejected = false;
    while (n_done < r.bytes_min) {
        const long n = read(r.fd, r.data + n_done, r.bytes - n_done, r.offset + n_done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EINVAL && !was_rejected) {
            was_rejected = true;
            read_through_cache(r.fd);
            continue;
        }
        if (n <= 0) {
            return n < 0 ? errno : ENODATA;
        }
        n_done += n;
        if (n_done % alignment != 0 && n_done < r.bytes_min) {
            return read_rest(r, n_done);
        }
    }
    if (!is_direct()) {
        drop_pages(r.fd, r);
    }
    return 0;
}

// It ended within a block, where no read around the page cache can begin; that need not be the file's end.
int spac_disk_reader::read_rest(const spac_disk_read & r, size_t n_done) {
    const int fd = open(("/proc/self/fd/" + std::to_string(r.fd)).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    int error = 0;
    while (n_done < r.bytes_min && error == 0) {
        const long n = read(fd, r.data + n_done, r.bytes - n_done, r.offset + n_done);
        if (n > 0) {
            n_done += n;
        } else if (n == 0 || errno != EINTR) {
            error = n == 0 ? ENODATA : errno;
        }
    }
    drop_pages(fd, r);
    close(fd);
    return error;
}

// from now on; many threads may come here at once
void spac_disk_reader::read_through_cache(int fd) {
#ifdef O_DIRECT
    const int flags = fcntl(fd, F_GETFL);
    if (flags >= 0 && (flags & O_DIRECT) && fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0 && !drops_pages.exchange(true)) {
        spac_log("the model's file system refuses reads around the page cache (O_DIRECT): experts are read through it, and dropped from it");
    }
#else
    (void) fd;
#endif
}
