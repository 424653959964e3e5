// The board: one block of memory through which engine and scheduler see each other.
// Engine and scheduler may be two threads or two processes; every field has one writer.
#pragma once

#include "spac.h"

#include <cstdint>
#include <string>

struct spac_board_geometry {
    uint32_t n_layer       = 0;
    uint32_t n_expert      = 0;
    uint32_t n_expert_used = 0;
    uint32_t n_slots       = 0;
    uint32_t max_batch     = 0;
};

struct spac_board_header;

struct spac_board {
    // private memory (name empty) or new shared memory /NAME, refused while its owner lives
    static spac_board * create(const std::string & name, const spac_board_geometry & geometry);
    // that of a running engine; throws unless magic, ABI version and sizes agree
    static spac_board * open(const std::string & name);

    // the process that created it
    static int32_t owner(const std::string & name);

    ~spac_board();

    spac_board_view view() const;

    // the engine's side, writable
    uint32_t *         counts() const;
    uint8_t *          residency() const;
    uint32_t *         expert_bytes() const;
    uint32_t *         group() const;
    uint32_t *         group_slots() const;
    spac_layer_stats * layer_stats() const;
    spac_counters *    counters() const;

    void push_record(const spac_step_record & record);

    // seqlock over the scheduler's arrays: odd while they are being written
    void     decision_begin();
    void     decision_end();
    uint64_t decision_seq() const;

    const spac_board_geometry & geometry() const { return geo; }

  private:
    spac_board() = default;

    void map(void * memory, size_t size);

    template <typename T>
    T * at(size_t offset) const { return (T *) (memory + offset); }

    spac_board_geometry geo;
    std::string         shm_name;
    bool                is_owner = false;
    char *              memory   = nullptr;
    size_t              size     = 0;
    spac_board_header * header   = nullptr;
};
