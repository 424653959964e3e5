// A file that is read around the page cache, where its file system can.
#pragma once

#include <cstddef>
#include <string>

struct spac_direct_file {
    int    fd;        // -1: it cannot be opened, see errno
    bool   is_direct; // false: the file system has no O_DIRECT
    size_t block;     // what O_DIRECT wants offsets, lengths and addresses to be multiples of; SPAC_DISK_ALIGNMENT at least
};

spac_direct_file spac_open_direct(const std::string & path);

// of an open file, as the kernel knows it
std::string spac_path_of(int fd);
