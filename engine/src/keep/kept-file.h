// One kept prompt as a file: whose it is, its tokens, the parts of its state, and sums over both that tell a whole file from a broken one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

using spac_parts = std::vector<std::vector<uint8_t>>;

struct spac_kept_head {
    std::vector<int32_t>  tokens;
    std::vector<uint64_t> sizes; // of the parts

    size_t n_bytes() const; // of the file
};

static constexpr size_t SPAC_KEY_CHARS = 64; // of a key: the model and all that a state depends on, as text

// NULL: it is written and on the disk; else what went wrong
const char * spac_write_kept(int fd, const std::string & key, const spac_kept_head & head, const spac_parts & parts);

// false: it is not whole, or has another key
bool spac_read_kept_head(int fd, const std::string & key, spac_kept_head & head);
bool spac_read_kept_parts(int fd, const std::string & key, const spac_kept_head & head, spac_parts & parts);
