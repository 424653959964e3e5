// The experts that memory holds, of a model whose experts lie on disk: slots of a bounded pool, and who gets them.
//
// A layer that was dispatched asks for its experts at once (`request`): those that are absent take the slots of the least
// useful, and are read all at the same time. Whoever computes waits for each (`wait`) when its turn comes, the ones that
// are there first. The usefulness of an expert is an average of how often it was used, which halves in HALF_LIFE tokens.
// Where a batch is so wide that it uses most experts of a layer, those of the next layer are read ahead.
//
// A device beside memory takes its experts from here (memory-tier-device.cpp): from the pool, or straight from disk through
// one more slot, which has no owner. What the device holds leaves the pool first.
//
// Threads: `request` and `use_on_device` by the one that plans a layer, when nothing computes; `wait` by all that compute;
// `copy_to_device` and `left_device` by the one that copies; reads end on the disk reader's threads.
#pragma once

#include "board/board.h"
#include "disk-reader.h"
#include "expert-files.h"
#include "layers/moe-layer.h"
#include "spac.h"
#include "victims.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

struct spac_memory_tier {
    // layers: in the order of a graph, each split, its weights in mapped files; bytes: of the pool, at most
    // throws SPAC_STATUS_INVALID_ARGUMENT if a layer's experts do not fit at once (and says what would), or if there is
    // no file; SPAC_STATUS_OUT_OF_MEMORY
    // feeds_device: a device takes experts from here
    // read, alignment: of a disk that is not there, for tests
    spac_memory_tier(const std::vector<const spac_moe_layer *> & layers, uint64_t bytes, bool feeds_device = false, spac_disk_reader::read_fn read = {},
                     size_t alignment = SPAC_DISK_ALIGNMENT);
    ~spac_memory_tier();

    // the layer computes these next; there[i]: it need not wait for experts[i]
    void request(const spac_moe_layer & layer, const int32_t * experts, const int32_t * n_rows, size_t n, int64_t n_batch, bool * there);

    // a predictor says that a layer which has not run yet will compute these, the likeliest first: those that are absent
    // are read while nothing waits for the disk, into the slots of the least useful that are neither needed nor expected; returns how many. By any thread.
    size_t expect(int il, const std::vector<int32_t> & experts);

    // A copy computes these for the layer that was just asked for: they are as useful as if they had been asked for, too, and those
    // that are more useful than what memory holds are read while nothing waits for the disk.
    void want(const spac_moe_layer & layer, const int32_t * experts, const int32_t * n_rows, size_t n, int64_t n_batch);

    bool has(uint32_t il, uint32_t ie) const { return il < by_il.size() && by_il[il] >= 0 && ie < info_of((int) il).experts.size(); }

    bool is_there(int il, int32_t ie) const; // now: a layer need not wait for it

    // until a requested expert is there; false: it could not be read, see info()
    bool wait(int il, int32_t ie);

    // of a requested expert that is there: the rows of one of its matrices
    const char * weights(int il, int32_t ie, int part) const;

    // Hands the device's copy of an expert to `copy`: out of the pool if it is there or on its way, else as it was read only
    // for this. false: it could not be read, and nothing was copied; that is no failure of a forward
    bool copy_to_device(int il, int32_t ie, const std::function<void(const spac_expert_parts &)> & copy);
    void left_device(int il, int32_t ie);
    // of these experts the device computes those with a slot: they are as useful as if the host did
    void use_on_device(int il, const int32_t * experts, const uint32_t * n_rows, const int32_t * device_slots, size_t n);

    void begin_forward(); // what failed is tried again, once nothing of the forward before is under way any more

    // what this forward computes is wrong: an expert could not be read
    bool           has_failed() const { return failed.load(std::memory_order_relaxed); }
    spac_tier_info info() const;
    void           show(spac_board & board) const; // what it holds, and what it did

  private:
    static constexpr double HALF_LIFE = 32.0; // tokens; the scheduler's estimator forgets as fast

    enum state : uint8_t { FREE,
                           READING,
                           THERE };

    struct slot {
        int32_t            il = -1, ie = -1;
        char *             data         = nullptr;
        bool               is_pinned    = false;
        bool               is_expected  = false; // until its layer runs
        bool               is_copied    = false; // to the device, now
        int32_t            n_reads_left = 0;
        bool               is_broken    = false;
        spac_expert_parts  parts        = {};
        std::atomic<state> now{ FREE };
    };

    struct mapping {
        char *   data  = (char *) -1; // MAP_FAILED
        uint64_t bytes = 0;

        ~mapping();
    };

    struct expert {
        int32_t slot = -1;
        float   use  = 0.0f; // as of the token `last`
        double  last = 0.0;
        double  rank = -INFINITY; // log2(use), comparable whenever it was used last

        bool is_on_device = false;
    };

    struct layer_info {
        const spac_moe_layer *   layer               = nullptr;
        layer_info *             next                = nullptr;
        spac_expert_files::place parts[SPAC_N_PARTS] = {};
        std::vector<expert>      experts;
    };

    layer_info &       info_of(int il) { return *layers[by_il[il]]; }
    const layer_info & info_of(int il) const { return *layers[by_il[il]]; }

    void    add(const spac_moe_layer & layer);
    void    make_slots(uint64_t bytes);
    void    touch() const;
    void    take(expert & e, double n_uses);
    double  rank_of(int32_t is) const;
    void    rate(int32_t is);
    int32_t find_victim(bool spares_expected = true) const;
    void    load(layer_info & info, int32_t ie, int32_t is, bool is_urgent);
    void    read(layer_info & info, int32_t ie, int32_t is, bool is_urgent);
    size_t  read_ahead(layer_info & info, const std::vector<int32_t> & experts);
    void    stop_expecting(layer_info & info);
    void    drop_unneeded(layer_info & info);
    size_t  round_up(size_t n) const;
    size_t  part_room(const spac_moe_layer & layer, int part) const;
    size_t  slot_room(const spac_moe_layer & layer) const;
    void    on_read(const spac_disk_read & read, int error);
    void    pin(int32_t is);
    void    unpin_all();
    void    set_expected(int32_t is, bool is_expected);
    void    set_on_device(expert & e, bool is_on_device);
    void    forget(slot & s);

    spac_expert_files                        files;
    std::vector<std::unique_ptr<layer_info>> layers; // in the order of a graph
    std::vector<int32_t>                     by_il;  // index in layers
    std::unique_ptr<slot[]>                  slots;
    std::unique_ptr<spac_victims>            victims; // of the slots but the extra one; guarded by the mutex
    int32_t                                  n_slots = 0;
    const int32_t                            n_extra; // slots behind them: 1 for what goes straight to the device, else 0
    mapping                                  pool;

    mutable std::mutex      mutex; // guards what follows, and the slots' fields but `now`
    std::condition_variable changed;
    std::vector<int32_t>    pinned;
    double                  n_tokens      = 0.0; // computed so far; a wide batch counts as PROMPT_TOKENS
    int                     n_waiting     = 0;
    uint64_t                waiting_since = 0;
    spac_tier_info          total         = {}; // only counts
    std::string             error_text;
    std::atomic<bool>       failed{ false };

    std::atomic<bool> is_ending{ false };
    std::thread       toucher;

    std::unique_ptr<spac_disk_reader> reader; // the first to end: its threads use the others
};
