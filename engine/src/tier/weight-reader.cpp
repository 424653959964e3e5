#include "weight-reader.h"

#include "base/clock.h"
#include "base/status.h"
#include "direct-file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

// Pieces end where huge pages do: of two threads that touch one first, both would clear it.
static constexpr size_t   PIECE     = 2 << 20;
static constexpr int      N_SAMPLES = 64; // places of a file that are looked for in the page cache
static constexpr uint64_t REPORT_US = 100000;

// ---- opening

// A read that must not wait is refused where it would have to. (mincore() answers only those who may write the file.)
static bool is_cached(int fd) {
#ifdef RWF_NOWAIT
    struct stat st      = {};
    int         n_found = 0;
    for (int64_t i = 0; fstat(fd, &st) == 0 && i < N_SAMPLES; i++) {
        char        byte;
        const iovec to = { &byte, 1 };
        n_found += preadv2(fd, &to, 1, st.st_size / N_SAMPLES * i, RWF_NOWAIT) == 1;
    }
    return n_found * 2 >= N_SAMPLES;
#else
    (void) fd;
    return false;
#endif
}

// Once more, as others use the loader's descriptor. Where a file system has no O_DIRECT all goes through the page cache.
void spac_weight_reader::open(file & f, int fd) {
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    f.fd                   = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (f.fd < 0) {
        throw std::system_error(errno, std::generic_category(), path);
    }
    if (is_cached(f.fd)) { // copying is all that there is to do: more threads than cores would be in each other's way
        f.depth = std::max<int32_t>(1, std::min<int32_t>(f.depth, (int32_t) std::thread::hardware_concurrency()));
        return;
    }
    const spac_direct_file file = spac_open_direct(path);
    if (file.fd >= 0 && file.is_direct) {
        close(f.fd);
        f.fd        = file.fd;
        f.is_direct = true;
        f.block     = file.block;
    } else if (file.fd >= 0) {
        close(file.fd);
    }
}

spac_weight_reader::spac_weight_reader(const llama_weight_read * reads, size_t n_reads, spac_disk_reader::read_fn read) :
    read(std::move(read)) {
    for (size_t i = 0; i < n_reads; i++) {
        const llama_weight_read & r = reads[i];
        auto [it, is_new]           = files.try_emplace(r.fd);
        std::vector<piece> & pieces = it->second.pieces;
        for (size_t at = 0; at < r.size; at += pieces.back().bytes) {
            char * const data = (char *) r.data + at;
            pieces.push_back({ r.offset + at, std::min(r.size - at, PIECE - (uintptr_t) data % PIECE), data });
        }
        total += r.size;
    }
    for (auto & [fd, f] : files) {
        std::sort(f.pieces.begin(), f.pieces.end(), [](const piece & a, const piece & b) { return a.offset < b.offset; });
    }
}

spac_weight_reader::~spac_weight_reader() {
    for (const auto & [fd, f] : files) {
        if (f.fd >= 0) {
            close(f.fd);
        }
    }
}

// ---- reading

bool spac_weight_reader::run(const progress_fn & progress) {
    for (auto & [fd, f] : files) {
        open(f, fd);
        if (!run_file(f, progress)) {
            return false;
        }
        close(f.fd);
        f.fd = -1;
    }
    return true;
}

struct free_aligned {
    void operator()(char * p) const { free(p); }
};

// A weight lies at any multiple of 32 bytes, which O_DIRECT does not take: whole blocks go into a buffer that stays in the
// processor's cache, and the weight's part from there to its place.
bool spac_weight_reader::run_file(const file & f, const progress_fn & progress) {
    const size_t                          room = PIECE + 2 * f.block;
    std::unique_ptr<char[], free_aligned> blocks;
    if (f.is_direct) {
        blocks.reset((char *) aligned_alloc(f.block, f.depth * room));
        if (!blocks) {
            throw std::bad_alloc();
        }
    }
    under_way.resize(f.depth);
    free_slots.resize(f.depth);
    std::iota(free_slots.begin(), free_slots.end(), 0);

    spac_disk_reader reader([&](const spac_disk_read & r, int error) { on_read(f, r, error); }, false, read, f.block);
    for (const piece & p : f.pieces) {
        const int32_t slot = wait(f, progress, 1);
        if (slot < 0) {
            return false;
        }
        const uint64_t skip  = p.offset % f.block;
        const size_t   bytes = (skip + p.bytes + f.block - 1) / f.block * f.block;
        under_way[slot]      = p;
        reader.submit({ f.fd, p.offset - skip, bytes, skip + p.bytes, f.is_direct ? blocks.get() + slot * room : p.data, slot }, false);
    }
    return wait(f, progress, f.depth) >= 0;
}

// until so many slots are free, one of which is taken then; -1: `progress` ends it
int32_t spac_weight_reader::wait(const file & f, const progress_fn & progress, size_t n_free) {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        if (error) {
            throw spac_error(SPAC_STATUS_INTERNAL, spac_format("%s cannot be read at byte %" PRIu64 ": %s", spac_path_of(f.fd).c_str(), bad_at,
                                                               error == ENODATA ? "it ends there; fetch it again" : strerror(error)));
        }
        if (spac_now_us() >= t_report) {
            const uint64_t n = n_done;
            lock.unlock();
            if (!progress(n)) {
                return -1;
            }
            t_report = spac_now_us() + REPORT_US;
            lock.lock();
        }
        if (free_slots.size() >= n_free) {
            const int32_t slot = free_slots.back();
            free_slots.pop_back();
            return slot;
        }
        changed.wait_for(lock, std::chrono::microseconds(REPORT_US));
    }
}

// on a thread of the disk reader's
void spac_weight_reader::on_read(const file & f, const spac_disk_read & r, int read_error) {
    const piece & p = under_way[r.slot];
    if (f.is_direct && !read_error) {
        memcpy(p.data, r.data + (p.offset - r.offset), p.bytes);
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (read_error && !error) {
        error  = read_error;
        bad_at = r.offset;
    }
    n_done += p.bytes;
    free_slots.push_back(r.slot);
    changed.notify_one();
}

// ---- what libllama calls

// How far it is, in the log of a program that asked for the engine; of what takes less than a moment nothing is said.
struct loading_log {
    static constexpr uint64_t EVERY_US = 2000000;

    const uint64_t total;
    const uint64_t t_begin = spac_now_us();
    uint64_t       t_next  = t_begin + EVERY_US;

    double gb_s(uint64_t n, uint64_t now) const { return n / 1e3 / std::max<uint64_t>(1, now - t_begin); }

    void show(uint64_t n) {
        const uint64_t now = spac_now_us();
        if (now >= t_next && n > 0) {
            t_next = now + EVERY_US;
            spac_log("loading: %.1f of %.1f GB, %.2f GB/s, %.0f s left", n / 1e9, total / 1e9, gb_s(n, now), (total - n) / gb_s(n, now) / 1e9);
        }
    }

    void end() const {
        const uint64_t now = spac_now_us();
        if (now - t_begin >= EVERY_US) {
            spac_log("loaded %.1f GB in %.1f s, %.2f GB/s", total / 1e9, (now - t_begin) / 1e6, gb_s(total, now));
        }
    }
};

static bool read_weights(const llama_weight_read * reads, size_t n_reads, llama_progress_callback progress, void * user_data) {
    spac_weight_reader reader(reads, n_reads);
    loading_log        log{ reader.n_bytes() };
    const char *       env     = getenv("PYSPAC_CACHE");
    const bool         is_told = env && *env;
    const bool         is_done = reader.run([&](uint64_t n) {
        if (is_told) {
            log.show(n);
        }
        return progress(reader.n_bytes() ? (float) ((double) n / reader.n_bytes()) : 1.0f, user_data);
    });
    if (is_told && is_done) {
        log.end();
    }
    return is_done;
}

// a llama_weight_reader
extern "C" SPAC_API bool spac_read_weights(const llama_weight_read * reads, size_t n_reads, llama_progress_callback progress, void * user_data,
                                           const char ** error) {
    static thread_local std::string text;
    try {
        return read_weights(reads, n_reads, progress, user_data);
    } catch (const spac_error & e) {
        text   = e.what();
        *error = text.c_str();
    } catch (const std::exception & e) {
        spac_log("the weights are read one by one: %s", e.what());
    }
    return false;
}
