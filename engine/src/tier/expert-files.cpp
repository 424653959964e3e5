#include "expert-files.h"

#include "base/status.h"
#include "direct-file.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <fstream>

#ifdef __linux__
#    include <sys/mman.h>
#    include <unistd.h>
#endif

#ifdef __linux__

spac_expert_files::spac_expert_files(size_t alignment) :
    mappings(read_mappings()), block(alignment) {}

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

// the kernel writes a newline as \012, and escapes nothing else: a name that has these four characters looks the same
static std::vector<std::string> paths_of(const std::string & written) {
    std::string path = written;
    for (size_t at = 0; (at = path.find("\\012", at)) != std::string::npos; at++) {
        path.replace(at, 4, "\n");
    }
    return path == written ? std::vector<std::string>{ written } : std::vector<std::string>{ written, path };
}

void spac_expert_files::open(mapping & m) {
    for (const mapping & other : mappings) {
        if (other.fd >= 0 && other.inode == m.inode && other.path == m.path) {
            m.fd = dup(other.fd);
            return;
        }
    }
    int error = 0;
    for (const std::string & path : paths_of(m.path)) {
        const spac_direct_file file = spac_open_direct(path);
        m.fd                        = file.fd;
        if (m.fd < 0) {
            error = errno;
        } else if (is_mapped_as(m)) {
            direct = direct && file.is_direct;
            block  = std::max(block, file.block);
            return;
        } else {
            close(m.fd);
            m.fd  = -1;
            error = 0;
        }
    }
    const char * const why = error ? strerror(error) : "it is not the file that the model was loaded from, but was put in its place; start again";
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("cannot open the model's file %s to read experts from it: %s", m.path.c_str(), why));
}

// stat's device is another one than a mapping's on btrfs and overlays: two mappings are compared
bool spac_expert_files::is_mapped_as(const mapping & m) {
    void * const page    = mmap(nullptr, 1, PROT_READ, MAP_SHARED, m.fd, 0);
    const auto   now     = read_mappings();
    const auto   same    = std::find_if(now.begin(), now.end(), [&](const mapping & n) { return page != MAP_FAILED && n.begin == (uintptr_t) page; });
    const bool   is_same = same != now.end() && same->inode == m.inode && same->dev_major == m.dev_major && same->dev_minor == m.dev_minor;
    if (page != MAP_FAILED) {
        munmap(page, 1);
    }
    return is_same;
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

spac_expert_files::spac_expert_files(size_t) {
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "experts on disk need Linux");
}

spac_expert_files::~spac_expert_files() = default;

spac_expert_files::place spac_expert_files::find(const void *, size_t) {
    return {};
}

#endif
