#include "expert-files.h"

#include "status.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <fstream>

#ifdef __linux__
#    include <fcntl.h>
#    include <sys/mman.h>
#    include <unistd.h>
#endif

#ifdef __linux__

spac_expert_files::spac_expert_files() :
    mappings(read_mappings()) {}

// a line of /proc/self/maps: begin-end perms offset major:minor inode path
std::vector<spac_expert_files::mapping> spac_expert_files::read_mappings() {
    std::vector<mapping> mappings;
    std::ifstream        maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        mapping m      = {};
        int     n_read = 0;
        m.fd           = -1;
        if (sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64 " %" SCNx64 ":%" SCNx64 " %" SCNu64 " %n", &m.begin, &m.end, &m.offset,
                   &m.dev_major, &m.dev_minor, &m.inode, &n_read) == 6 &&
            m.inode != 0) {
            m.path = line.substr(n_read);
            mappings.push_back(m);
        }
    }
    return mappings;
}

spac_expert_files::~spac_expert_files() {
    for (const mapping & m : mappings) {
        if (m.fd >= 0) {
            close(m.fd);
        }
    }
}

void spac_expert_files::open(mapping & m) {
    for (const mapping & other : mappings) {
        if (other.fd >= 0 && other.inode == m.inode && other.path == m.path) {
            m.fd = dup(other.fd);
            return;
        }
    }
    m.fd = ::open(m.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (m.fd < 0 && errno == EINVAL) {
        direct = false;
        m.fd   = ::open(m.path.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (m.fd < 0) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("cannot open the model's file %s to read experts from it: %s", m.path.c_str(), strerror(errno)));
    }
    // stat's device is another one than a mapping's on btrfs and overlays: two mappings are compared
    void * const page    = mmap(nullptr, 1, PROT_READ, MAP_SHARED, m.fd, 0);
    const auto   now     = read_mappings();
    const auto   same    = std::find_if(now.begin(), now.end(), [&](const mapping & n) { return page != MAP_FAILED && n.begin == (uintptr_t) page; });
    const bool   is_same = same != now.end() && same->inode == m.inode && same->dev_major == m.dev_major && same->dev_minor == m.dev_minor;
    if (page != MAP_FAILED) {
        munmap(page, 1);
    }
    if (!is_same) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s is not the file that the model was loaded from: it was replaced; start again", m.path.c_str()));
    }
}

spac_expert_files::place spac_expert_files::find(const void * data, size_t bytes) {
    const uintptr_t p = (uintptr_t) data;
    for (mapping & m : mappings) {
        if (p >= m.begin && p + bytes <= m.end) {
            if (m.fd < 0) {
                open(m);
            }
            return { m.fd, m.offset + (p - m.begin) };
        }
    }
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "the model's experts are in memory already, not in a mapped file: "
                                                   "give the memory for experts when the model is loaded (llama.cpp: lazy_mode experts)");
}

#else

spac_expert_files::spac_expert_files() {
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "experts on disk need Linux");
}

spac_expert_files::~spac_expert_files() = default;

spac_expert_files::place spac_expert_files::find(const void *, size_t) {
    return {};
}

#endif
