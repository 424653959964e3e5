// Who leaves a device for an expert that its layer asks for: the rules of SpecMD, Appendix B, and of those it cites, with the names
// and the orders of pyspac/lab/eviction.
#pragma once

#include "slot-table.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct spac_eviction {
    // what is known of an expert
    struct history {
        uint64_t n_used   = 0; // layers' calls
        uint64_t n_there  = 0; // of them, those that found it on the device, and copies of it
        uint64_t turn     = 0; // at its last use, in order; an expert that came later has that of its coming
        uint64_t call     = 0; // the layer's call that used it last
        uint64_t forward  = 0; // in which it was last used, or came
        uint64_t last_use = 0; // the forward
        double   weight   = 0; // the router's, of all its uses
    };

    // the lowest leaves; of equals, that with the lower second number, then that in the first slot
    using worth = std::pair<double, uint64_t>;

    static std::vector<std::string> names();
    static bool                     is_known(const std::string & name);
    static bool                     is_by_utility(const std::string & name); // as a scheduler decides, whose estimator has this name

    spac_eviction(const std::string & name, spac_slot_table & table);

    bool wants_weights() const;

    // With the table's mutex held. A layer runs: its experts, the slots of those that are there (else -1), and the router's
    // weight that each has of its tokens; NULL: not asked
    void use(uint32_t il, const int32_t * experts, const int32_t * slots, const double * weights, size_t n);
    void come(uint32_t key); // a copy has completed

    // slots of a group whose experts leave, at most n, the first to leave first: residents that nobody uses
    std::vector<int32_t> victims(spac_slot_table::slot_group & group, size_t n) const;

  private:
    worth worth_of(uint32_t key, const spac_slot_table::slot & slot) const;

    const size_t         rule;
    spac_slot_table &    table;
    std::vector<history> known; // [n_layer * n_expert]
    uint64_t             n_turns     = 1;
    uint64_t             layer_began = 1; // the turn
    uint64_t             n_calls     = 0;
    uint32_t             il_now      = 0;
};
