// A policy that pyspac is compared with, as its user names it: who leaves the device, and what becomes of experts that are asked
// for and not there ("lru+fetch"). Both names are the lab's (pyspac/lab/eviction, pyspac/lab/miss), as is "+per-layer" behind them.
#pragma once

#include <string>

struct spac_baseline {
    enum miss_kind { FETCH,        // copied while their layer waits
                     BALANCE,      // some are copied, the host computes the others, so that both end together (HybriMoE)
                     HOST_ADMIT }; // the host computes them, and a few of each layer are copied for the next time

    // "": none
    // name: of the option; throws SPAC_STATUS_INVALID_ARGUMENT
    spac_baseline(const char * name, const std::string & text);

    bool is_on() const { return !eviction.empty(); }
    bool is_scheduled() const; // whether a scheduler's decisions count beside it

    std::string eviction;
    miss_kind   miss      = FETCH;
    bool        per_layer = false; // each layer has slots of its own; else those of one layout share them
};
