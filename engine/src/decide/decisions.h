// Who decides what the device holds: a scheduler through the board, or the built-in policy while there is none.
#pragma once

#include "board/board.h"
#include "cache/device-caches.h"
#include "default-policy.h"
#include "tier/memory-tier.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

struct spac_decisions {
    // cache: empty where the device is "none": decisions are read, and move nothing
    // tier: of experts on disk, where the device is "none": a decision's loads are read ahead into memory; or NULL
    // policy: NULL where a scheduler of the engine's own process decides
    spac_decisions(spac_board & board, const spac_device_caches & cache, spac_memory_tier * tier, std::unique_ptr<spac_default_policy> policy);

    // layers [n_layer] that a decision wants whole on the device; set before the first is taken over; empty: not needed
    std::function<void(const uint8_t * wanted)> want_whole;

    void    take_over();                                                   // the board's decision, if it is new and whole; by the graph, the worker or the ABI
    void    begin_forward();                                               // takes over, and looks after a scheduler that may be gone
    void    begin_layer();                                                 // takes over again where the scheduler looks ahead: it may have been told late
    int32_t n_draft_max(int32_t server_slot, int32_t n_matched = 0) const; // behind such a match; 0: wherever; -1: no limit

  private:
    bool is_overdue() const;
    void run_policy();
    void read_ahead();

    spac_board &                               board;
    const spac_device_caches                   cache;
    spac_memory_tier * const                   tier;
    const std::unique_ptr<spac_default_policy> policy;

    // a copy, as another process may go on writing
    std::mutex    mutex; // guards the two below
    spac_decision decision;
    uint64_t      decision_seen = 0;

    bool looks_ahead = false; // in the forward in progress

    // a scheduler in another process may die or hang
    std::atomic<bool>     is_scheduled{ false }; // it decided at least once
    std::atomic<bool>     is_abandoned{ false }; // and then not for too long
    std::atomic<uint64_t> undecided_us{ 0 };     // how long forwards have gone on without a decision
    uint64_t              t_last_forward = 0;
};
