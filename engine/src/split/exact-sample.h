// A server's batches where a lossy mode has a limit (--max-kl): each is computed as kl-limit.h says, and now and then both ways, on the
// same cache. Then the exact pass is the one that stays, and the divergence of the lossy one from it is the sample:
// KL(exact || lossy) of a token's next-token distribution. What lossy forwards before left in the cache is in both, and not seen:
// the limit's price adds it. Few samples say little of so uneven a thing, so they only say what a unit costs, and each lossy token
// is charged by its own units: (share of the router's weight that was left out)^2 * entropy of its distribution. A small change of
// all logits diverges by half their variance, and a token whose next one is certain has none.
#pragma once

#include "kl-limit.h"

#include "llama.h"

#include <functional>
#include <vector>

struct llama_batch_ext;

struct spac_exact_sample {
    // price: spac_kl_limit's; max_batch: tokens of the widest batch of which something may be left out
    // throws SPAC_STATUS_INVALID_ARGUMENT if the model's cache cannot take back its last tokens
    spac_exact_sample(llama_context * ctx, double max_kl, double price, size_t max_batch);

    int32_t process(llama_batch_ext * batch); // llama_moe_hook's

    spac_kl_limit limit;

    std::function<bool(int32_t sequence)>               may_be_lossy        = [](int32_t) { return true; };
    std::function<void(bool is_exact, bool is_counted)> begin_pass          = [](bool, bool) {};  // told before each; counted: the only one, or the second
    std::function<double()>                             take_share_left_out = [] { return 0.0; }; // of the last pass
    std::function<void()>                               end_batch           = [] {};

  private:
    struct row {
        int32_t            index; // in the batch
        std::vector<float> logits;
    };

    size_t  n_lossy(const llama_batch_ext & batch) const;
    double  units(const llama_batch_ext & batch, size_t n_lossy) const;
    int32_t pass(llama_batch_ext * batch, bool is_exact, bool is_counted) const;
    int32_t both(llama_batch_ext * batch);
    bool    take_back(const llama_batch_ext & batch) const;

    llama_context * const ctx;
    const size_t          max_batch;
};

// of two distributions as logits, in nats: of the exact one from the other
double spac_kl_divergence(const float * exact, const float * other, size_t n);
double spac_entropy(const float * logits, size_t n); // in nats
