// Which bytes of which file a model's weights are: llama.cpp maps the GGUF files of a model whose experts it reads
// lazily, and the kernel knows what is mapped where. So nobody needs to hand down a path, and a model in several files
// is no special case.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct spac_expert_files {
    spac_expert_files(); // of this process, as it is now
    ~spac_expert_files();

    spac_expert_files(const spac_expert_files &) = delete;

    struct place {
        int      fd;
        uint64_t offset;
    };

    // where `data` came from; throws SPAC_STATUS_INVALID_ARGUMENT if it is no file's, or not this one's any more
    place find(const void * data, size_t bytes);

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

    std::vector<mapping> mappings;
    bool                 direct = true;
};
