#include "trace-file.h"

#include "base/status.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>

static constexpr char   MAGIC[]      = "spactrc1"; // without its final zero
static constexpr size_t BUFFER_BYTES = 1 << 20;

static std::mutex                                            files_mutex;
static std::map<std::string, std::weak_ptr<spac_trace_file>> files;

std::shared_ptr<spac_trace_file> spac_trace_file::open(const std::string & path) {
    std::lock_guard<std::mutex>      lock(files_mutex);
    std::shared_ptr<spac_trace_file> file = files[path].lock();
    if (!file) {
        file        = std::make_shared<spac_trace_file>(path);
        files[path] = file;
    }
    return file;
}

static spac_error cannot(const std::string & path, const char * why) {
    return spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_TRACE \"%s\": %s; give another file", path.c_str(), why));
}

spac_trace_file::spac_trace_file(const std::string & path) :
    path(path) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        throw cannot(path, strerror(errno));
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        close(fd);
        throw cannot(path, "another process writes it");
    }
    file = ftruncate(fd, 0) == 0 || errno == EINVAL ? fdopen(fd, "wb") : nullptr; // a pipe has no length
    if (!file) {
        const int error = errno;
        close(fd);
        throw cannot(path, strerror(error));
    }
    setvbuf(file, nullptr, _IOFBF, BUFFER_BYTES);
    check(fwrite(MAGIC, strlen(MAGIC), 1, file) == 1);
}

spac_trace_file::~spac_trace_file() {
    flush();
    fclose(file);
}

void spac_trace_file::check(bool is_good) {
    if (!is_good && !failed) {
        failed = true;
        spac_log("%s cannot be written (%s): nothing more is computed", path.c_str(), strerror(errno));
    }
}

void spac_trace_file::write(spac_trace_kind kind, uint32_t context, const std::vector<std::pair<const void *, size_t>> & parts) {
    std::lock_guard<std::mutex> lock(mutex);

    struct {
        uint32_t kind, context;
        uint64_t n_bytes;
    } header = { kind, context, 0 };

    for (const auto & part : parts) {
        header.n_bytes += part.second;
    }
    if (!failed) {
        check(fwrite(&header, sizeof(header), 1, file) == 1);
    }
    for (const auto & [data, n_bytes] : parts) {
        if (!failed && n_bytes) {
            check(fwrite(data, n_bytes, 1, file) == 1);
        }
    }
}

void spac_trace_file::flush() {
    std::lock_guard<std::mutex> lock(mutex);
    if (!failed) {
        check(fflush(file) == 0);
    }
}
