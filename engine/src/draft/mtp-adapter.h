// What is drafted by an adapter with mask tokens: its file's own keys (pyspac/model/mtp.py), logits in, drafts out.
#pragma once

#include "ggml.h"
#include "llama.h"

#include <string>
#include <vector>

struct spac_guess {
    llama_token token;
    float       score;
};

struct spac_mtp_adapter {
    // throws SPAC_STATUS_INVALID_ARGUMENT where the file is none, or its numbers do not fit each other
    explicit spac_mtp_adapter(const std::string & path);

    // the likeliest tokens of a mask, which can follow one another; logits: [n_vocab]
    std::vector<spac_guess> top(const float * logits, int32_t n_vocab) const;

    // the one of them that goes best behind the token before
    llama_token choose(const std::vector<spac_guess> & guesses, llama_token previous) const;

    std::vector<llama_token> mask_ids;

  private:
    float pair_score(llama_token a, llama_token b) const;

    size_t                   n_top = 1;      // so many of a mask's tokens are scored; without a sampler the likeliest
    size_t                   rank  = 0;      // of the sampler; 0: there is none
    std::vector<ggml_fp16_t> previous, next; // [n_vocab, rank]
};
