// The board: one block of memory through which engine and scheduler see each other.
//
// The engine's own copy is private memory. A board with a name is also a file in shared memory (/dev/shm/pyspac.NAME),
// which others map; the engine only ever reads and writes it with pread and pwrite, so that truncating, removing
// or scribbling on the file can neither crash it nor change what it counts. Every field has one writer.
#pragma once

#include "spac.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct spac_board_geometry {
    uint32_t n_layer       = 0;
    uint32_t n_expert      = 0;
    uint32_t n_expert_used = 0;
    uint32_t n_slots       = 0;
    uint32_t max_batch     = 0;
    uint32_t n_device      = 1;
};

// a scheduler's decision, whole
struct spac_decision {
    uint64_t              seq = 0;     // of the sequence lock; 0: none was ever made
    std::vector<uint8_t>  utility;     // [n_layer * n_expert]
    std::vector<uint8_t>  tau;         // [n_layer]
    std::vector<uint32_t> load;        // [n_load]
    std::vector<uint8_t>  want_whole;  // [n_layer]
    std::vector<uint64_t> byte_budget; // [n_device]
};

struct spac_board_file;

struct spac_board {
    // in private memory
    static spac_board * create(const spac_board_geometry & geometry);
    // as a file too, from now on; refused while another board of this name is in use
    void share(const std::string & name);
    // maps that of a running engine; throws unless magic, ABI version and sizes agree
    static spac_board * open(const std::string & name);

    // the process that made it, in its own numbering; 0: it is gone; throws if there is no board
    static int32_t owner(const std::string & name);

    ~spac_board();

    bool is_shared() const { return file != nullptr; }

    spac_board(const spac_board &) = delete;

    spac_board_view view() const;

    // the engine's side, writable
    uint32_t *          counts() const;
    uint32_t *          prompt_counts() const;
    uint8_t *           residency() const;
    uint32_t *          expert_bytes() const;
    uint32_t *          group() const;
    uint32_t *          group_slots() const;
    uint32_t *          layer_device() const;
    spac_layer_stats *  layer_stats() const;
    spac_counters *     counters() const;
    spac_ahead_stats *  ahead() const;
    spac_device_stats * devices() const;
    spac_tier_info *    tier() const;
    uint8_t *           in_memory() const;
    uint8_t *           whole() const;
    int32_t *           routed_tokens() const;
    uint16_t *          routed_experts() const;

    // others see what the engine wrote only after this; a file that was truncated is made whole again
    // even_if_idle: though no counter has changed since the last time
    void publish(bool even_if_idle = true);
    void push_record(const spac_step_record & record); // published at once

    // the routing log's next n rows, at most SPAC_N_ROUTED_MAX, to be written in place from then on; those begun before are
    // published whole; returns the first one's index
    uint64_t begin_rows(int64_t n);
    void     end_rows();

    // what the next batch computes, published at once, for a scheduler in another process that asks for it
    bool looks_ahead() const;
    void look_ahead(const int32_t * tokens, int32_t n_tokens);

    // takes over the scheduler's decision if its number is not `seen` and it is whole
    bool    read_decision(uint64_t seen, spac_decision & decision) const;
    int32_t n_draft_max(int32_t server_slot) const; // -1: no limit

    // the scheduler's side: a sequence lock, odd while its arrays are being written
    void decision_begin();
    void decision_end();

    const spac_board_geometry & geometry() const { return geo; }

  private:
    spac_board();

    template <typename T>
    T * at(size_t offset) const { return (T *) (memory + offset); }

    bool     read(size_t offset, void * to, size_t n) const;
    bool     write(size_t offset, size_t n);
    uint64_t decision_seq() const; // of the sequence lock

    spac_board_geometry geo;
    char *              memory = nullptr;
    size_t              mapped = 0; // bytes, where the memory is somebody else's file

    std::mutex                       file_mutex;        // guards the two below, and writing: the graph's thread and the worker do
    bool                             is_torn   = false; // the file was truncated, and is not yet whole again
    spac_counters                    published = {};
    std::unique_ptr<spac_board_file> file; // of an engine whose board has a name
};
