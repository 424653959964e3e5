// Reads a model's weights into host memory while it is loaded: out of the page cache where that has their file, else around
// it; many pieces at once, so that the disk is what takes the time. libllama calls it (patches/hooks/0008).
#pragma once

#include "disk-reader.h"

#include "llama-weight-reader.h"

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

struct spac_weight_reader {
    typedef std::function<bool(uint64_t n_bytes)> progress_fn; // read so far; false: stop

    // read: as spac_disk_reader's, for tests. Throws std::system_error where a file cannot be opened once more
    spac_weight_reader(const llama_weight_read * reads, size_t n_reads, spac_disk_reader::read_fn read = {});
    ~spac_weight_reader();

    spac_weight_reader(const spac_weight_reader &) = delete;

    uint64_t n_bytes() const { return total; }

    // false: `progress` said so, which is asked several times a second, on this thread. Throws spac_error where a file cannot be
    // read, std::system_error where the system has no thread
    bool run(const progress_fn & progress);

  private:
    struct piece {
        uint64_t offset;
        size_t   bytes;
        char *   data;
    };

    struct file {
        int                fd        = -1;
        bool               is_direct = false;
        size_t             block     = 1;
        int32_t            depth     = 16; // pieces under way
        std::vector<piece> pieces;
    };

    static void open(file & f, int fd);
    bool        run_file(const file & f, const progress_fn & progress);
    int32_t     wait(const file & f, const progress_fn & progress, size_t n_free);
    void        on_read(const file & f, const spac_disk_read & read, int error);

    const spac_disk_reader::read_fn read;
    std::map<int, file>             files; // by the loader's descriptor
    uint64_t                        total    = 0;
    uint64_t                        t_report = 0; // of the next question to `progress`

    std::vector<piece>      under_way; // by slot
    std::mutex              mutex;     // guards the fields below
    std::condition_variable changed;
    std::vector<int32_t>    free_slots;
    uint64_t                n_done = 0;
    int                     error  = 0; // of the first read that failed
    uint64_t                bad_at = 0;
};
