// How many of the forwards may be lossy so that the KL divergence of all tokens, in the mean, stays near a limit: each token earns
// the limit, a lossy one costs its units (spac_exact_sample) times what a unit was seen to cost lately, and a forward that cannot pay
// is exact. Now and then one is computed both ways, which is how the cost is known.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

struct spac_kl_limit {
    enum way { LOSSY,
               EXACT,
               BOTH };

    static constexpr uint64_t N_FIRST = 16;  // samples before the first forward that is lossy
    static constexpr uint64_t N_EARLY = 512; // until there are so many, one forward of OFTEN is a sample, by chance; then one of EVERY
    static constexpr uint64_t OFTEN   = 8;
    static constexpr uint64_t EVERY   = 16;
    static constexpr double   WEIGHT  = 1.0 / N_EARLY; // of a sample, from then on
    static constexpr size_t   N_SAVED = 64;            // tokens whose earnings may be saved up
    // what a full evaluation finds, as a multiple of what samples see, which miss what lossy tokens leave in the cache: 1.07 to 1.30
    // on the demo, whatever the rule, the share of lossy tokens and the text. Of "route" more: its units say less where experts that
    // are worth the same change places
    static constexpr double PRICE       = 1.2;
    static constexpr double PRICE_ROUTE = 1.45;

    explicit spac_kl_limit(double max_kl, double price = PRICE) :
        max_kl(max_kl), price(price) {}

    // how the next forward is computed, which has n tokens that may be lossy
    way choose(size_t n) {
        n_tokens += n;
        saved = std::min(saved + n * max_kl, N_SAVED * std::max(max_kl, price * mean));
        if (n_samples < N_FIRST || n_until_next-- == 0) {
            n_until_next = draw_gap(n_samples < N_EARLY ? OFTEN : EVERY);
            return BOTH;
        }
        return saved < n * price * mean ? EXACT : LOSSY;
    }

    // what the tokens of a lossy forward have of units
    void add_lossy(double units) {
        const double cost = mean_units > 0 ? price * mean * units / mean_units : 0;
        saved -= cost;
        spent += cost;
    }

    // of one token that was computed both ways: nats, and the units of its lossy way
    void add_sample(double kl, double units) {
        n_samples++;
        sampled += kl;
        const double weight = std::max(1.0 / n_samples, WEIGHT);
        mean += (kl - mean) * weight;
        mean_units += (units - mean_units) * weight;
    }

    const double max_kl, price;

    uint64_t n_tokens = 0, n_samples = 0;
    double   sampled = 0; // of all samples
    double   spent   = 0; // by all tokens, as estimated
    double   mean    = 0; // of samples, lately

  private:
    // forwards before the next sample, of which one of `every` is one: by chance, as a text that repeats itself, which a greedy choice
    // writes, would show the same of its tokens each time
    uint64_t draw_gap(uint64_t every) {
        random = random * 1664525u + 1013904223u;
        return (random >> 16) % (2 * every - 1);
    }

    uint32_t random       = 1;
    uint64_t n_until_next = 0;
    double   mean_units   = 0;
    double   saved        = 0;
};
