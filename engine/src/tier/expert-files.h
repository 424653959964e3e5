// Which bytes of which file a model's weights are: llama.cpp maps the GGUF files of a model whose experts it reads
// lazily, and the kernel knows what is mapped where. So no path needs to be handed down, and a model in several files
// is no special case.
#pragma once

#include "disk-reader.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct spac_expert_files {
    // of this process, as it is now; alignment: the least
    explicit spac_expert_files(size_t alignment = SPAC_DISK_ALIGNMENT);
    ~spac_expert_files();

    spac_expert_files(const spac_expert_files &) = delete;

    struct place {
        int      fd;
        uint64_t offset;
    };

    // where `data` came from; throws SPAC_STATUS_INVALID_ARGUMENT if it is no file's, or not this one's any more
    place find(const void * data, size_t bytes);

    // of the files found so far: what O_DIRECT wants offsets, lengths and addresses to be multiples of
    size_t alignment() const { return block; }

    bool is_direct() const { return direct; } // false: a file system without O_DIRECT; pages are dropped after each read

  private:
    struct mapping {
        uintptr_t   begin, end;
        uint64_t    offset, inode;
        uint64_t    dev_major, dev_minor;
        std::string path;
        int         fd; // -1: not open yet
    };

    static std::vector<mapping> read_mappings();

    void open(mapping & m);

    static bool is_mapped_as(const mapping & m); // what m.fd is now

    std::vector<mapping> mappings;
    bool                 direct = true;
    size_t               block  = 0;
};
