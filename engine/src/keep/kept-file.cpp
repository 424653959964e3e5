#include "kept-file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include <sys/stat.h>
#include <unistd.h>

static constexpr char     MAGIC[8]  = { 's', 'p', 'a', 'c', 'k', 'e', 'p', '2' };
static constexpr uint64_t MAX_PARTS = 1 << 16;

struct fixed_part {
    char     magic[8];
    uint64_t n_tokens;
    uint64_t n_parts;
    uint64_t n_bytes;
    char     key[SPAC_KEY_CHARS];
};

// of words in four lanes, as one lane would wait for its own products
static uint64_t sum_of(const void * data, size_t n_bytes, uint64_t seed) {
    static constexpr uint64_t PRIME    = 0x9e3779b97f4a7c15;
    uint64_t                  lanes[4] = { seed, seed + 1, seed + 2, seed + n_bytes };
    const uint8_t *           p        = (const uint8_t *) data;
    for (size_t i = 0; i < n_bytes; i += sizeof(lanes)) {
        uint64_t words[4] = {};
        memcpy(words, p + i, std::min(sizeof(lanes), n_bytes - i));
        for (int k = 0; k < 4; k++) {
            lanes[k] = (lanes[k] ^ words[k]) * PRIME;
            lanes[k] ^= lanes[k] >> 29;
        }
    }
    uint64_t sum = 0;
    for (uint64_t lane : lanes) {
        sum = ((sum ^ lane) * PRIME) ^ (lane >> 31);
    }
    return sum;
}

static bool write_all(int fd, const void * data, size_t n_bytes) {
    for (const char * p = (const char *) data; n_bytes > 0;) {
        const ssize_t n = write(fd, p, std::min(n_bytes, (size_t) 1 << 30));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            return false;
        }
        p += n;
        n_bytes -= (size_t) n;
    }
    return true;
}

static bool read_all(int fd, void * data, size_t n_bytes, uint64_t offset) {
    for (char * p = (char *) data; n_bytes > 0;) {
        const ssize_t n = pread(fd, p, std::min(n_bytes, (size_t) 1 << 30), (off_t) offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        p += n;
        n_bytes -= (size_t) n;
        offset += (uint64_t) n;
    }
    return true;
}

static size_t size_before_parts(const spac_kept_head & head) {
    return sizeof(fixed_part) + head.tokens.size() * sizeof(int32_t) + head.sizes.size() * sizeof(uint64_t) + sizeof(uint64_t);
}

size_t spac_kept_head::n_bytes() const {
    return std::accumulate(sizes.begin(), sizes.end(), size_before_parts(*this)) + sizeof(uint64_t);
}

static fixed_part make_fixed(const std::string & key, const spac_kept_head & head) {
    fixed_part fixed = { {}, head.tokens.size(), head.sizes.size(), head.n_bytes(), {} };
    memcpy(fixed.magic, MAGIC, sizeof(MAGIC));
    memcpy(fixed.key, key.data(), std::min(key.size(), sizeof(fixed.key)));
    return fixed;
}

static uint64_t sum_of_head(const fixed_part & fixed, const spac_kept_head & head) {
    const uint64_t sum = sum_of(head.tokens.data(), head.tokens.size() * sizeof(int32_t), sum_of(&fixed, sizeof(fixed), 0));
    return sum_of(head.sizes.data(), head.sizes.size() * sizeof(uint64_t), sum);
}

// of the head, too, by its sum: another file's parts are none of these
static uint64_t sum_of_parts(uint64_t sum_head, const spac_parts & parts) {
    return std::accumulate(parts.begin(), parts.end(), sum_head, [](uint64_t sum, const auto & part) { return sum_of(part.data(), part.size(), sum); });
}

const char * spac_write_kept(int fd, const std::string & key, const spac_kept_head & head, const spac_parts & parts) {
    const fixed_part fixed    = make_fixed(key, head);
    const uint64_t   sum      = sum_of_head(fixed, head);
    const uint64_t   sum_last = sum_of_parts(sum, parts);

    bool is_good = write_all(fd, &fixed, sizeof(fixed)) && write_all(fd, head.tokens.data(), head.tokens.size() * sizeof(int32_t)) &&
                   write_all(fd, head.sizes.data(), head.sizes.size() * sizeof(uint64_t)) && write_all(fd, &sum, sizeof(sum));
    for (const auto & part : parts) {
        is_good = is_good && write_all(fd, part.data(), part.size());
    }
    return is_good && write_all(fd, &sum_last, sizeof(sum_last)) && fsync(fd) == 0 ? nullptr : strerror(errno);
}

bool spac_read_kept_head(int fd, const std::string & key, spac_kept_head & head) {
    fixed_part  fixed;
    struct stat status;
    if (fstat(fd, &status) != 0 || !read_all(fd, &fixed, sizeof(fixed), 0) || memcmp(fixed.magic, MAGIC, sizeof(MAGIC)) != 0) {
        return false;
    }
    if (fixed.n_bytes != (uint64_t) status.st_size || fixed.n_parts > MAX_PARTS || fixed.n_tokens > fixed.n_bytes / sizeof(int32_t)) {
        return false;
    }
    head.tokens.resize(fixed.n_tokens);
    head.sizes.resize(fixed.n_parts);
    const size_t n_token_bytes = fixed.n_tokens * sizeof(int32_t), n_size_bytes = fixed.n_parts * sizeof(uint64_t);
    uint64_t     sum = 0;
    if (!read_all(fd, head.tokens.data(), n_token_bytes, sizeof(fixed)) || !read_all(fd, head.sizes.data(), n_size_bytes, sizeof(fixed) + n_token_bytes) ||
        !read_all(fd, &sum, sizeof(sum), sizeof(fixed) + n_token_bytes + n_size_bytes)) {
        return false;
    }
    const fixed_part expected = make_fixed(key, head); // has the size that follows from the parts, too
    return sum == sum_of_head(fixed, head) && memcmp(&expected, &fixed, sizeof(fixed)) == 0;
}

bool spac_read_kept_parts(int fd, const std::string & key, const spac_kept_head & head, spac_parts & parts) {
    uint64_t offset = size_before_parts(head), sum = 0;
    parts.clear();
    for (uint64_t size : head.sizes) {
        parts.emplace_back(size);
        if (!read_all(fd, parts.back().data(), size, offset)) {
            return false;
        }
        offset += size;
    }
    return read_all(fd, &sum, sizeof(sum), offset) && sum == sum_of_parts(sum_of_head(make_fixed(key, head), head), parts);
}
