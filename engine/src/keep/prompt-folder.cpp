#include "prompt-folder.h"

#include "base/status.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

static constexpr char   KEPT[] = ".prompt", BEING_WRITTEN[] = ".prompt.tmp";
static constexpr size_t KEY_CHARS_IN_NAME = 16;

struct folder_lock {
    folder_lock(int fd, int how = LOCK_EX) :
        fd(fd) {
        while ((is_held = flock(fd, how) == 0, !is_held) && errno == EINTR) {
        }
    }

    ~folder_lock() {
        if (is_held) {
            flock(fd, LOCK_UN);
        }
    }

    const int fd;
    bool      is_held = false;
};

struct open_file {
    open_file(int folder, const std::string & name, int flags) :
        fd(openat(folder, name.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {}

    ~open_file() {
        if (fd >= 0) {
            close(fd);
        }
    }

    const int fd;
};

static size_t n_shared(const std::vector<int32_t> & kept, const int32_t * tokens, size_t n_tokens) {
    const size_t n = std::min(kept.size(), n_tokens);
    return (size_t) (std::mismatch(kept.begin(), kept.begin() + (ptrdiff_t) n, tokens).first - kept.begin());
}

static bool begins_with(const spac_kept_head & head, const spac_kept_head & start) {
    return n_shared(start.tokens, head.tokens.data(), head.tokens.size()) == start.tokens.size();
}

static bool ends_with(const std::string & name, const std::string & ending) {
    return name.size() > ending.size() && name.compare(name.size() - ending.size(), ending.size(), ending) == 0;
}

spac_prompt_folder::spac_prompt_folder(const std::string & path, const std::string & key, size_t max_bytes) :
    max_bytes(max_bytes), path(path), key(key) {
    fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("PYSPAC_KEEP \"%s\": %s; give a folder", path.c_str(), strerror(errno)));
    }
    if (const folder_lock lock(fd, LOCK_EX | LOCK_NB); lock.is_held) { // else another server does so
        make_room(0, {});
    }
    heads();
}

spac_prompt_folder::~spac_prompt_folder() {
    close(fd);
}

std::vector<spac_prompt_folder::entry> spac_prompt_folder::list(const char * ending) const {
    std::vector<entry> found;
    DIR *              dir = opendir(path.c_str());
    for (const dirent * one = nullptr; dir && (one = readdir(dir));) {
        struct stat status;
        if (ends_with(one->d_name, ending) && fstatat(fd, one->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(status.st_mode)) {
            found.push_back({ one->d_name, (size_t) status.st_size, status.st_mtim.tv_sec * INT64_C(1000000000) + status.st_mtim.tv_nsec });
        }
    }
    if (dir) {
        closedir(dir);
    }
    std::sort(found.begin(), found.end(), [](const entry & a, const entry & b) { return a.used_ns < b.used_ns; });
    return found;
}

spac_prompt_folder::heads_by_name spac_prompt_folder::heads() {
    std::lock_guard<std::mutex> lock(mutex);
    heads_by_name               now;
    for (const entry & one : list(KEPT)) {
        if (one.name.compare(0, KEY_CHARS_IN_NAME, key, 0, KEY_CHARS_IN_NAME) != 0) {
            continue;
        }
        auto & head = now[one.name];
        if (const auto it = known.find(one.name); it != known.end()) {
            head = it->second;
            continue;
        }
        const open_file file(fd, one.name, O_RDONLY);
        auto            read = std::make_shared<spac_kept_head>();
        head                 = file.fd >= 0 && spac_read_kept_head(file.fd, key, *read) ? read : nullptr; // NULL: never used, in time thrown away
    }
    return known = now;
}

void spac_prompt_folder::remove(const std::string & name) {
    unlinkat(fd, name.c_str(), 0);
}

// under the lock: no one else is writing, so what is being written was left by a server that was killed
void spac_prompt_folder::make_room(size_t n_bytes, const std::vector<std::string> & first) {
    for (const entry & one : list(BEING_WRITTEN)) {
        remove(one.name);
    }
    std::vector<entry> kept = list(KEPT);
    std::stable_partition(kept.begin(), kept.end(), [&](const entry & one) { return std::find(first.begin(), first.end(), one.name) != first.end(); });
    for (const entry & one : kept) {
        n_bytes += one.n_bytes;
    }
    for (const entry & one : kept) {
        if (n_bytes > max_bytes) {
            remove(one.name);
            n_bytes -= one.n_bytes;
        }
    }
}

// it, or one that begins with it, which is used now
bool spac_prompt_folder::has(const spac_kept_head & head) {
    for (const auto & [name, kept] : heads()) {
        if (kept && begins_with(*kept, head)) {
            utimensat(fd, name.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
            return true;
        }
    }
    return false;
}

void spac_prompt_folder::save(spac_kept_head && head, const spac_parts & parts) {
    if (head.n_bytes() > max_bytes) {
        spac_log("a prompt of %zu tokens is not kept: its %zu MiB are more than --keep-mib %zu", head.tokens.size(), head.n_bytes() >> 20, max_bytes >> 20);
        return;
    }
    const folder_lock lock(fd);
    if (!lock.is_held || has(head)) {
        return;
    }
    std::vector<std::string> older;
    for (const auto & [name, kept] : heads()) {
        if (kept && begins_with(head, *kept)) {
            older.push_back(name);
        }
    }
    make_room(head.n_bytes(), older);
    write(head, parts);
    if (has(head)) {
        std::for_each(older.begin(), older.end(), [this](const std::string & name) { remove(name); });
    }
}

// a file under another name first: a name that says kept has all of it, on the disk
void spac_prompt_folder::write(const spac_kept_head & head, const spac_parts & parts) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const std::string name  = spac_format("%.*s-%lld%09ld-%d", (int) KEY_CHARS_IN_NAME, key.c_str(), (long long) now.tv_sec, now.tv_nsec, (int) getpid());
    const std::string final = name + KEPT, early = name + BEING_WRITTEN;

    const open_file file(fd, early, O_WRONLY | O_CREAT | O_EXCL);
    const char *    why = file.fd < 0 ? strerror(errno) : spac_write_kept(file.fd, key, head, parts);
    if (!why && renameat(fd, early.c_str(), fd, final.c_str()) != 0) {
        why = strerror(errno);
    }
    if (why) {
        remove(early);
        spac_log("a prompt of %zu tokens is not kept in %s: %s", head.tokens.size(), path.c_str(), why);
    } else {
        fsync(fd);
    }
}

std::vector<int32_t> spac_prompt_folder::load(const int32_t * tokens, size_t n_tokens, size_t n_min, size_t n_max, spac_parts & parts) {
    std::string                           name;
    std::shared_ptr<const spac_kept_head> best;
    size_t                                n_best = n_min;
    for (const auto & [one, head] : heads()) {
        const size_t n = head && head->tokens.size() <= n_max ? n_shared(head->tokens, tokens, n_tokens) : 0;
        if (n > n_best && n >= head->tokens.size() / 4) {
            name = one, best = head, n_best = n;
        }
    }
    if (!best) {
        return {};
    }
    const open_file file(fd, name, O_RDONLY);
    if (file.fd < 0) {
        return {}; // another server has thrown it away
    }
    if (!spac_read_kept_parts(file.fd, key, *best, parts)) {
        spac_log("a kept prompt is not whole any more, and is thrown away: %s/%s", path.c_str(), name.c_str());
        remove(name);
        return {};
    }
    futimens(file.fd, nullptr);
    return best->tokens;
}
