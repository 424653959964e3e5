// A drafter: what libspac asks libspac-common for. The functions throw std::exception; drafter.cpp checks what they get.
#pragma once

#include "spac.h"

#include <vector>

struct spac_drafter {
    virtual ~spac_drafter() = default;

    // returns how many tokens of the last sequence the next one begins with: `n_keep` at most
    virtual int32_t begin(int32_t n_keep) = 0;

    // the target's last batch; `pos` is length() at most
    virtual void process(const int32_t * tokens, int32_t n_tokens, int32_t pos) = 0;

    // the same, of a batch without drafts, which is looked at when the next draft is made; until then states are kept
    virtual void defer(const int32_t * tokens, int32_t n_tokens, int32_t pos) = 0;

    // at most `n_max` tokens to follow `token` at `pos`, which is length() at most
    virtual std::vector<int32_t> draft(int32_t token, int32_t pos, int32_t n_max) = 0;

    // of the last draft, which had as many at least
    virtual void accept(int32_t n_accepted) = 0;

    // tokens of the sequence that were processed
    virtual int32_t length() const = 0;

    int32_t n_drafted = 0; // in the last draft
};

// what libspac-common exports
using spac_drafter_make_fn  = spac_drafter * (*) (const spac_drafter_params *);
using spac_drafter_types_fn = const char * (*) ();
