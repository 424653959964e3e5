// A token's experts chosen anew with those that are there preferred (SpecMD, eq. 1; Skliar et al. 2025): z' = z + strength * delta for
// them. Their weights stay the router's own. delta is the running mean of the range of a token's logits: their mean, as the paper has
// it, has no scale of its own, and a negative one would put back what is there.
#pragma once

#include <cstdint>
#include <vector>

struct spac_cache_routing {
    explicit spac_cache_routing(double strength) :
        strength(strength) {}

    void learn(const float * logits, int64_t n_expert); // of a token

    // is_there: [n_expert]; wanted, chosen: [n_used] as the router has it, and anew: the same where the same experts are best
    void choose(const float * logits, const std::vector<uint8_t> & is_there, const int32_t * wanted, int64_t n_used, int32_t * chosen);

    // share of the weight of those wanted that the chosen have (of a softmax; stand-ins count what they are worth)
    static double share_kept(const float * logits, const int32_t * wanted, const int32_t * chosen, int64_t n_used);

  private:
    const double         strength;
    double               delta  = 0;
    uint64_t             n_seen = 0;
    std::vector<int32_t> order;
    std::vector<double>  biased;
};
