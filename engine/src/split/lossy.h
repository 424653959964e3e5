// What a forward may leave out, where its user allows it (SpecMD, 3.1.2): an expert that is not there is left out where its token
// needs it least ("drop:2"), or computed from a copy in fewer bits ("lowbit:2:FILE"), or another one that is on the device takes
// its place where routers rate both alike ("substitute:0.1"), or routers prefer those that are there ("route:0.2",
// cache-routing.h).
#pragma once

#include "ggml.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

struct spac_lossy {
    static constexpr size_t MAX_COPIES = 8;

    enum kind { NONE,
                DROP,
                LOWBIT,
                SUBSTITUTE,
                ROUTE };

    struct rule {
        kind    what      = NONE;
        int32_t n_kept    = 0; // of drop and lowbit: each token's best ones that are always computed exactly
        double  tolerance = 0; // of substitute: ratings differ by less
        double  strength  = 0; // of route: spac_cache_routing's

        std::vector<std::string> copies;        // of lowbit: files, in falling bits; the n_kept next best are the first one's, and so on
        bool                     drops = false; // of lowbit: what would be one more copy's is left out
    };

    // as of read(); "": nothing is left out
    explicit spac_lossy(const std::string & text);

    // name: of the option; throws SPAC_STATUS_INVALID_ARGUMENT
    static rule read(const char * name, const std::string & text);

    bool is_on() const { return by.what != NONE; }
    bool substitutes() const { return by.what == SUBSTITUTE; }
    bool routes() const { return by.what == ROUTE; }

    double strength() const { return by.strength; }

    const std::vector<std::string> & copies() const { return by.copies; }

    // Of the experts of one layer's tokens, what becomes of each: of drop, those that are not there and rank n_kept or worse among
    // their token's, by weight, are left out; of substitute, those that are not there, as there is another one for them; of lowbit
    // they are a copy's, and one that several tokens use is the best for all that it is for one: it is read once. weights: [1,
    // n_expert_used, n_tokens]; is_there, copy_of: [n_expert_used * n_tokens]
    // n_tokens_counted: first ones, whose weights are added up
    // sequence_of: [n_tokens] whose tokens they are; empty: nobody asks
    // index_of: [n_expert_used * n_tokens] which expert, from 0 on, or -1; of lowbit
    void choose(const ggml_tensor & weights, const std::vector<uint8_t> & is_there, int64_t n_tokens_counted, const std::vector<int32_t> & sequence_of = {},
                const std::vector<int32_t> & index_of = {});

    bool is_left_out(size_t i) const { return copy_of[i] > by.copies.size(); } // as of choose()

    // of a token that was routed anew: what its experts have of the weight of those that its router chose
    void count_routed(int32_t sequence, double share, bool is_counted);

    // the share of router weight that was not exact since the last call, of all tokens that may be lossy, counted or not
    double take_share_left_out();

    void keep_all(int64_t n_rows); // the same, of a batch that is computed as it is

    // of substitute: what a router says of the experts of a layer, each time that it chooses one
    void rate(uint32_t il, int32_t n_expert, int32_t ie, float weight);
    // the one of `spare` that is rated most like ie, and leaves spare; -1: none is alike
    int32_t take_alike(uint32_t il, int32_t ie, std::vector<int32_t> & spare) const;

    // of a server's requests, each of which has a sequence
    void   begin_request(int32_t sequence, bool is_exact); // exact: nothing of it is left out
    bool   may_leave_out(int32_t sequence) const;
    double share_kept(int32_t sequence) const; // of the router's weight, since it began; -1: nothing may be left out

    std::vector<uint8_t> copy_of;         // 0: exact; k: from the k-th copy; more than there are copies: left out
    uint64_t             n_left_out  = 0; // of the last choice: those that are not exact
    double               weight      = 0; // of all experts of the counted tokens, absolute values
    double               weight_kept = 0; // of exact ones

  private:
    struct request {
        bool   is_exact = false;
        double weight = 0, weight_kept = 0;
    };

    double asked = 0, left_out = 0; // weights, for take_share_left_out

    struct rating {
        double   weight   = 0;
        uint64_t n_chosen = 0;
    };

    double  rating_of(uint32_t il, int32_t ie) const;                // the mean weight so far; infinite: never chosen
    uint8_t copy_for(int64_t rank) const;                            // of an expert that is not there
    void    take_best_of_all(const std::vector<int32_t> & index_of); // tokens that use an expert

    const rule                              by;
    std::map<int32_t, request>              requests; // by sequence
    std::map<uint32_t, std::vector<rating>> ratings;  // by layer: [n_expert]
};
