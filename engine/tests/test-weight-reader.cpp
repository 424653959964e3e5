// Weights that are read while a model is loaded: the bytes are the file's, whatever it is read through; a read that fails, a
// file that ends too early, a system without threads, and a stop each leave nothing open.
#include "base/status.h"
#include "check.h"
#include "tier/weight-reader.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

extern "C" bool spac_read_weights(const llama_weight_read * reads, size_t n_reads, llama_progress_callback progress, void * user_data, const char ** error);

static std::atomic<bool> has_threads{ true };

extern "C" int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * arg) noexcept {
    static const auto real = (int (*)(pthread_t *, const pthread_attr_t *, void * (*) (void *), void *)) dlsym(RTLD_NEXT, "pthread_create");
    return has_threads ? real(thread, attributes, run, arg) : EAGAIN;
}

static size_t n_open() {
    size_t n = 0;
    for (const auto & entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        n += !entry.path().empty();
    }
    return n;
}

// a file of random bytes, and where parts of it shall be
struct weights {
    std::string                    path;
    int                            fd;
    std::vector<char>              bytes, memory;
    std::vector<llama_weight_read> reads;

    weights(const std::string & folder, unsigned seed, size_t n_bytes = (9 << 20) + 77) :
        path(folder + "/spac-weights-XXXXXX"), fd(mkstemp(path.data())), bytes(n_bytes), memory(n_bytes + 64) {
        std::mt19937_64 random(seed);
        for (char & byte : bytes) {
            byte = (char) random();
        }
        CHECK(fd >= 0 && write(fd, bytes.data(), bytes.size()) == (ssize_t) bytes.size() && fsync(fd) == 0);
        // sizes from a few bytes to more than two pieces; all but a hole at the beginning, in another order than the file's
        static constexpr size_t SIZES[] = { 5 << 20, 96, 1000003 };
        for (size_t at = 32, i = 0; at < n_bytes; i++) {
            const size_t size = std::min(n_bytes - at, SIZES[i % 3]);
            reads.insert(reads.begin(), { fd, at, size, memory.data() + at + 17 });
            at += size;
        }
    }

    ~weights() {
        close(fd);
        unlink(path.c_str());
    }

    void forget_pages() const { CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0); }
    bool is_right() const { return memcmp(memory.data() + 17 + 32, bytes.data() + 32, bytes.size() - 32) == 0; }
};

static bool go_on(float, void *) {
    return true;
}

static std::string error_of(const weights & w, spac_disk_reader::read_fn read = {}) {
    try {
        spac_weight_reader reader(w.reads.data(), w.reads.size(), std::move(read));
        CHECK(reader.run([](uint64_t) { return true; }));
    } catch (const spac_error & e) {
        return e.what();
    }
    return "";
}

static void test_bytes(const std::string & folder, bool is_cached) {
    weights a(folder, 1), b(folder, 2, 5000);
    if (!is_cached) {
        a.forget_pages();
        b.forget_pages();
    }
    std::vector<llama_weight_read> reads = a.reads;
    reads.insert(reads.begin() + 1, b.reads.begin(), b.reads.end());
    std::vector<float> progress;
    const char *       error = nullptr;
    const auto         note  = [](float done, void * to) { return ((std::vector<float> *) to)->push_back(done), true; };
    CHECK(spac_read_weights(reads.data(), reads.size(), note, &progress, &error) && !error);
    CHECK(a.is_right() && b.is_right());
    for (size_t i = 0; i < progress.size(); i++) {
        CHECK(progress[i] >= 0 && progress[i] <= 1 && (i == 0 || progress[i] >= progress[i - 1]));
    }
    CHECK(spac_read_weights(nullptr, 0, go_on, nullptr, &error) && !error);
}

static void test_short_reads(const std::string & folder) {
    const weights w(folder, 3);
    const auto    half = [](int fd, void * data, size_t n, uint64_t offset) { return (long) pread(fd, data, n / 2 | 1, (off_t) offset); };
    w.forget_pages();
    CHECK(error_of(w, half).empty() && w.is_right());
}

static void test_failures(const std::string & folder) {
    weights          w(folder, 4);
    std::atomic<int> n_reads{ 0 };
    const auto       fails = [&](int fd, void * data, size_t n, uint64_t offset) {
        if (++n_reads == 3) {
            errno = EIO;
            return -1L;
        }
        return (long) pread(fd, data, n, (off_t) offset);
    };
    const std::string text = error_of(w, fails);
    CHECK(text.find(w.path) == 0 && text.find(strerror(EIO)) != std::string::npos);

    for (const bool is_cached : { true, false }) {
        CHECK(ftruncate(w.fd, 6 << 20) == 0 && fsync(w.fd) == 0);
        if (!is_cached) {
            w.forget_pages();
        }
        CHECK(error_of(w).find("it ends there") != std::string::npos);
        const char * error = nullptr;
        CHECK(!spac_read_weights(w.reads.data(), w.reads.size(), go_on, nullptr, &error) && error && strstr(error, "it ends there"));
    }
}

static void test_stop(const std::string & folder) {
    const weights w(folder, 5);
    const char *  error = nullptr;
    CHECK(!spac_read_weights(w.reads.data(), w.reads.size(), [](float, void *) { return false; }, nullptr, &error) && !error);
}

// the loader reads by itself then
static void test_no_threads(const std::string & folder) {
    const weights w(folder, 6);
    const char *  error = nullptr;
    has_threads         = false;
    CHECK(!spac_read_weights(w.reads.data(), w.reads.size(), go_on, nullptr, &error) && !error);
    has_threads = true;
}

int main() {
    const size_t n_before = n_open();
    for (const std::string & folder : { std::filesystem::temp_directory_path().string(), std::string("/dev/shm") }) {
        test_bytes(folder, true);
        test_bytes(folder, false);
        test_short_reads(folder);
        test_failures(folder);
        test_stop(folder);
        test_no_threads(folder);
        CHECK(n_open() == n_before);
    }
    return 0;
}
