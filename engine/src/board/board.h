// The board: one block of memory through which engine and scheduler see each other.
//
// The engine's own copy is private memory. A board with a name is also a file in shared memory (/dev/shm/pyspac.NAME),
// which others map; the engine only ever reads and writes it with pread and pwrite, so that truncating, removing
// or scribbling on the file can neither crash it nor change what it counts. Every field has one writer.
#pragma once

#include "spac.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

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

    static bool is_sane(const spac_board_geometry & geometry);

    // the process that made it, in its own numbering; 0: it is gone; throws if there is no board
    static int32_t owner(const std::string & name);

    ~spac_board();

    bool is_shared() const { return file != nullptr; }

    spac_board(const spac_board &) = delete;

    const spac_board_view & view() const { return arrays; }

#define SPAC_ACCESSOR(name, type, shape, writer, meaning) \
    type * name() const { return arrays.name; }
    SPAC_BOARD_FIELDS(SPAC_ACCESSOR)
#undef SPAC_ACCESSOR

    const std::vector<spac_board_field> & fields() const { return list; }

    // others see what the engine wrote only after this; a file that was truncated is made whole again
    // even_if_idle: though no counter has changed since the last time
    void publish(bool even_if_idle = true);
    void push_record(const spac_step_record & record); // published at once

    // the routing log's next n rows, at most SPAC_N_ROUTED_MAX, to be written in place from then on; those begun before are
    // published whole; returns the first one's index
    uint64_t begin_rows(int64_t n);
    void     end_rows();

    // what the next batch computes, published at once, for a scheduler in another process that asks for it
    void look_ahead(const int32_t * tokens, int32_t n_tokens);

    // takes over the scheduler's decision if its number is not `seen` and it is whole
    bool    read_decision(uint64_t seen, spac_decision & decision);
    bool    is_asked_ahead() const;                                        // looks_ahead; of a scheduler in another process as of the last read_decision
    int32_t draft_limit(int32_t server_slot, int32_t n_matched = 0) const; // behind such a match; 0: wherever; -1: none

    // the scheduler's side: a sequence lock, odd while its arrays are being written
    void decision_begin();
    void decision_end();

    const spac_board_geometry & geometry() const { return arrays.geometry; }

  private:
    spac_board();

    // of one of the arrays, or a part of it
    template <typename T>
    bool     read(const T * from, T * to, size_t n) const;
    bool     write(const void * first, const void * end);
    uint64_t look_at_decision(); // its number in the sequence lock, and looks_ahead
    void     place();

    std::vector<spac_board_field> list;
    spac_board_view               arrays = {};
    char *                        memory = nullptr;
    size_t                        mapped = 0; // bytes, where the memory is somebody else's file

    std::atomic<bool>                asks_ahead{ false }; // in the file
    std::mutex                       file_mutex;          // guards the two below, and writing: the graph's thread and the worker do
    bool                             is_torn   = false;   // the file was truncated, and is not yet whole again
    spac_counters                    published = {};
    std::unique_ptr<spac_board_file> file; // of an engine whose board has a name
};
