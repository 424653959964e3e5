// How many of the forwards may be lossy so that the KL divergence of all tokens, in the mean, stays below a limit: each token earns
// the limit, a lossy one costs what lossy ones were seen to cost lately, and a forward that cannot pay is exact. Now and then one is
// computed both ways, which is how the cost is known.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

struct spac_kl_limit {
    enum way { LOSSY,
               EXACT,
               BOTH };

    static constexpr uint64_t N_FIRST = 16;  // samples before the first forward that is lossy
    static constexpr uint64_t N_EARLY = 128; // until there are so many, one forward of OFTEN is a sample; then one of EVERY
    static constexpr uint64_t OFTEN   = 4;
    static constexpr uint64_t EVERY   = 16;
    static constexpr double   WEIGHT  = 1.0 / N_EARLY; // of a sample, from then on
    static constexpr size_t   N_SAVED = 64;            // tokens whose earnings may be saved up

    explicit spac_kl_limit(double max_kl) :
        max_kl(max_kl) {}

    // how the next forward is computed, which has n tokens that may be lossy
    way choose(size_t n) {
        n_tokens += n;
        saved = std::min(saved + n * max_kl, N_SAVED * std::max(max_kl, mean));
        if (n_samples < N_FIRST || ++n_forwards % (n_samples < N_EARLY ? OFTEN : EVERY) == 0) {
            return BOTH;
        }
        const double cost = n * mean;
        if (saved < cost) {
            return EXACT;
        }
        saved -= cost;
        spent += cost;
        return LOSSY;
    }

    // of one token that was computed both ways, in nats
    void add_sample(double kl) {
        n_samples++;
        sampled += kl;
        mean += (kl - mean) * std::max(1.0 / n_samples, WEIGHT);
    }

    const double max_kl;

    uint64_t n_tokens = 0, n_samples = 0;
    double   sampled = 0; // of all samples
    double   spent   = 0; // by all tokens, as estimated
    double   mean    = 0; // of a lossy token, lately

  private:
    uint64_t n_forwards = 0;
    double   saved      = 0;
};
