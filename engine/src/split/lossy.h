// What a forward may leave out, where its user allows it (SpecMD, 3.1.2): an expert that is not there and that its token needs least.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

struct spac_lossy {
    // as of read(); "": nothing is left out
    explicit spac_lossy(const std::string & text);

    // N of "drop:N": each token's best N experts are always computed; name: of the option
    // throws SPAC_STATUS_INVALID_ARGUMENT
    static int32_t read(const char * name, const std::string & text);

    bool is_on() const { return n_kept > 0; }

    // Of the experts of one layer's tokens, which are left out: those that are not there and rank n_kept or worse among their
    // token's, by weight. weights: [1, n_expert_used, n_tokens]; is_there, is_left_out: [n_expert_used * n_tokens]
    // n_tokens_counted: first ones, whose weights are added up
    void choose(const ggml_tensor & weights, const std::vector<uint8_t> & is_there, int64_t n_tokens_counted);

    void keep_all(int64_t n_rows); // the same, of a batch that is computed as it is

    std::vector<uint8_t> is_left_out;
    uint64_t             n_left_out  = 0; // of the last choice
    double               weight      = 0; // of all experts of the counted tokens, absolute values
    double               weight_kept = 0;

  private:
    int32_t n_kept = 0;
};
