#include "board-file.h"

#include "base/status.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

static const char * const FOLDER = "/dev/shm"; // where Linux keeps POSIX shared memory

// Two that start at once may find and remove the same leftover, whose lock one of them holds for a moment.
static constexpr int N_TRIES = 8, TRY_MS = 2;

static std::string path_of(const std::string & name) {
    const auto is_fit = [](char c) { return isalnum((unsigned char) c) || c == '_' || c == '.' || c == '-'; };
    const bool ok     = !name.empty() && name.size() <= SPAC_BOARD_NAME_MAX && std::all_of(name.begin(), name.end(), is_fit) &&
                    name[0] != '.' && name[0] != '-';
    if (!ok) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("the board name cannot be \"%s\": give 1 to %d letters, digits, '_', '.' or '-', "
                                                                   "not beginning with '.' or '-'",
                                                                   name.c_str(), SPAC_BOARD_NAME_MAX));
    }
    return spac_format("%s/pyspac.%s", FOLDER, name.c_str());
}

static struct flock whole_file(short type) {
    struct flock lock = {};
    lock.l_type       = type;
    lock.l_whence     = SEEK_SET;
    return lock;
}

static bool lock(int fd) {
    struct flock wanted = whole_file(F_WRLCK);
    return fcntl(fd, F_OFD_SETLK, &wanted) == 0;
}

bool spac_board_file::is_locked(int fd) {
    struct flock wanted = whole_file(F_WRLCK);
    return fcntl(fd, F_OFD_GETLK, &wanted) == 0 && wanted.l_type != F_UNLCK;
}

static bool is_at(int fd, const std::string & path) {
    struct stat own = {}, named = {};
    return fstat(fd, &own) == 0 && stat(path.c_str(), &named) == 0 && own.st_ino == named.st_ino && own.st_dev == named.st_dev;
}

// O_NONBLOCK: a FIFO of this name must not hang the start
static int open_plain(const std::string & path, int flags) {
    const int fd = ::open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    struct stat st = {};
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid()) {
        return fd;
    }
    close(fd);
    errno = EINVAL;
    return -1;
}

int spac_board_file::open(const std::string & name, int flags) {
    const int fd = open_plain(path_of(name), flags);
    if (fd < 0 && errno == ENOENT) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("no board \"%s\": is its server running?", name.c_str()));
    }
    if (fd < 0) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("%s is no board of this user (%s): remove it, or choose another name",
                                                        path_of(name).c_str(), strerror(errno)));
    }
    return fd;
}

// a nameless file, whole and locked
static int make_file(const void * content, size_t size, const std::string & path) {
    const int fd    = ::open(FOLDER, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    int       error = fd < 0 ? errno : 0;
    if (!error) {
        error = posix_fallocate(fd, 0, size); // a full file system shows here, not when a page is touched
    }
    if (!error && (!lock(fd) || pwrite(fd, content, size, 0) != (ssize_t) size)) {
        error = errno ? errno : ENOSPC;
    }
    if (error) {
        if (fd >= 0) {
            close(fd);
        }
        throw spac_error(error == ENOSPC ? SPAC_STATUS_OUT_OF_MEMORY : SPAC_STATUS_BOARD, spac_format("the board %s of %zu bytes cannot be made: %s%s", path.c_str(), size, strerror(error),
                                                                                                      error == ENOSPC ? "; free memory there (df /dev/shm)" : ""));
    }
    return fd;
}

// with its lock held, so that whoever else found it looks again
static void unlink_locked(int fd, const std::string & path) {
    if (is_at(fd, path)) {
        unlink(path.c_str());
    }
}

void spac_board_file::remove_left_behind(const std::string & name) {
    const std::string path = path_of(name);
    const int         fd   = open_plain(path, O_RDWR);
    if (fd >= 0 && lock(fd)) {
        unlink_locked(fd, path);
    }
    if (fd >= 0) {
        close(fd);
    }
}

// false: somebody has its lock; throws if it is no board
static bool try_clear(const std::string & path, std::string & who, const std::function<std::string(int)> & describe) {
    const int fd = open_plain(path, O_RDWR);
    if (fd < 0 && errno == ENOENT) {
        return true;
    }
    if (fd < 0) {
        throw spac_error(SPAC_STATUS_BOARD, spac_format("%s is in the way, and is no board of this user (%s): remove it, or choose another name",
                                                        path.c_str(), strerror(errno)));
    }
    const bool is_free = lock(fd);
    if (is_free) {
        unlink_locked(fd, path);
    }
    who = is_free ? "" : describe(fd);
    close(fd);
    return is_free;
}

// removes what is in the way, if it was left behind
static void clear_path(const std::string & path, const std::string & name, const std::function<std::string(int)> & describe) {
    std::string who;
    for (int i = 0; i < N_TRIES; i++) {
        if (try_clear(path, who, describe)) {
            return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(TRY_MS)); // who only removes a leftover is soon done
    }
    throw spac_error(SPAC_STATUS_BOARD, spac_format("board \"%s\" is in use by %s: choose another name or stop that process", name.c_str(), who.c_str()));
}

spac_board_file::spac_board_file(const std::string & name, const void * content, size_t size, const std::function<std::string(int)> & describe) :
    path(path_of(name)), size(size) {
    clear_path(path, name, describe); // who has the name is known before memory is asked for
    fd = make_file(content, size, path);
    try {
        const std::string nameless = spac_format("/proc/self/fd/%d", fd);
        for (int i = 0; linkat(AT_FDCWD, nameless.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0; i++) {
            if (errno != EEXIST || i == N_TRIES) {
                throw spac_error(SPAC_STATUS_BOARD, spac_format("the board cannot be named %s: %s", path.c_str(), strerror(errno)));
            }
            clear_path(path, name, describe);
        }
    } catch (...) {
        close(fd);
        throw;
    }
}

spac_board_file::~spac_board_file() {
    if (is_at(fd, path)) {
        unlink(path.c_str());
    }
    close(fd);
}

bool spac_board_file::read(size_t offset, void * to, size_t n) const {
    return pread(fd, to, n, offset) == (ssize_t) n;
}

bool spac_board_file::write(size_t offset, const void * from, size_t n) {
    const bool ok = pwrite(fd, from, n, offset) == (ssize_t) n;
    if (!ok && !has_erred) {
        has_erred = true;
        spac_log("the board %s cannot be written (%s): its scheduler sees nothing new", path.c_str(), strerror(errno));
    }
    return ok;
}

bool spac_board_file::is_whole() const {
    struct stat st = {};
    return fstat(fd, &st) != 0 || (size_t) st.st_size == size;
}

bool spac_board_file::resize() {
    const int error = ftruncate(fd, size) != 0 ? errno : posix_fallocate(fd, 0, size);
    if (error && !has_erred) {
        has_erred = true;
        spac_log("the board %s was truncated and cannot be extended (%s): its scheduler sees nothing new", path.c_str(), strerror(error));
    }
    return error == 0;
}
