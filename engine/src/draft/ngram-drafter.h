// Drafts of a server's slots: what followed the longest match, the last tokens where they stood before in the same sequence.
//
// The index is a chain of the places of each pair of tokens, the latest first. It follows the sequence by itself: what has
// changed since the last draft leaves it, and what has come is added.
#pragma once

#include "spac.h"

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

struct spac_ngram_drafter {
    explicit spac_ngram_drafter(int32_t n_draft_max) :
        n_draft_max(n_draft_max) {}

    // limit of a draft behind a match of so many tokens; -1: none
    std::function<int32_t(int32_t slot, int32_t n_matched)> limit = [](int32_t, int32_t) { return -1; };

    // as llama_moe_hook's: behind tokens, then id_last, n_max at most
    int32_t draft(int32_t slot, const int32_t * tokens, int32_t n_tokens, int32_t id_last, int32_t n_max, const int32_t ** drafted);

    void forget(int32_t slot);                              // what it passed over is compared no more
    void end_step(int32_t slot, spac_step_record & record); // its match, and whether the one that was passed over before would have held

  private:
    struct sequence {
        std::vector<int32_t>                  tokens;
        std::unordered_map<uint64_t, int32_t> latest;          // by pair of tokens: the place behind it
        std::vector<int32_t>                  before;          // [place] the one before of the same pair; 0: none
        int32_t                               distance    = 0; // from the end back to the last source; 0: there was none
        int32_t                               n_matched   = 0; // of the step under way; 0: none
        int32_t                               n_passed    = 0; // of a match whose draft was not made; 0: none
        size_t                                at_passed   = 0;
        int32_t                               next_passed = 0; // the token that it would have drafted
        int32_t                               news        = 0; // n_passed if that held, -n_passed if not
        std::vector<int32_t>                  drafted;

        void    follow(const int32_t * given, int32_t n_given, int32_t id_last);
        void    tell_passed();
        int32_t match();
        int32_t n_matched_at(size_t place) const;
        void    copy(int32_t n);
    };

    const int32_t         n_draft_max;
    std::vector<sequence> slots;
};
