#include "direct-file.h"

#include "disk-reader.h"

#include <algorithm>
#include <cerrno>
#include <climits>

#ifdef __linux__

#    include <fcntl.h>
#    include <sys/stat.h>
#    include <unistd.h>

// Kernels before 6.1 and some file systems do not tell. One that tells of 0 cannot read around the page cache, though it may
// have taken O_DIRECT.
static void note_alignment(spac_direct_file & file) {
#    ifdef STATX_DIOALIGN
    struct statx st = {};
    if (statx(file.fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) != 0 || !(st.stx_mask & STATX_DIOALIGN)) {
        return;
    }
    file.block = std::max<size_t>({ file.block, st.stx_dio_mem_align, st.stx_dio_offset_align });
    if (st.stx_dio_mem_align == 0 || st.stx_dio_offset_align == 0) {
        file.is_direct = false;
        fcntl(file.fd, F_SETFL, fcntl(file.fd, F_GETFL) & ~O_DIRECT);
    }
#    else
    (void) file;
#    endif
}

spac_direct_file spac_open_direct(const std::string & path) {
    spac_direct_file file = { open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT), true, SPAC_DISK_ALIGNMENT };
    if (file.fd < 0 && errno == EINVAL) {
        file = { open(path.c_str(), O_RDONLY | O_CLOEXEC), false, SPAC_DISK_ALIGNMENT };
    } else if (file.fd >= 0) {
        note_alignment(file);
    }
    return file;
}

std::string spac_path_of(int fd) {
    char          path[PATH_MAX];
    const ssize_t n = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof(path));
    return n < 0 ? "" : std::string(path, n);
}

#else

spac_direct_file spac_open_direct(const std::string &) {
    errno = ENOSYS;
    return { -1, false, SPAC_DISK_ALIGNMENT };
}

std::string spac_path_of(int) {
    return "";
}

#endif
