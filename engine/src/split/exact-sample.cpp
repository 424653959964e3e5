#include "exact-sample.h"

#include "base/status.h"

#include "llama-batch.h"

#include <cmath>
#include <map>

static double log_sum(const float * logits, size_t n) {
    const double max = *std::max_element(logits, logits + n);
    double       sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += std::exp(logits[i] - max);
    }
    return max + std::log(sum);
}

double spac_kl_divergence(const float * exact, const float * other, size_t n) {
    const double log_exact = log_sum(exact, n), log_other = log_sum(other, n);
    double       kl = 0;
    for (size_t i = 0; i < n; i++) {
        const double p = std::exp(exact[i] - log_exact);
        kl += p > 0 ? p * ((exact[i] - log_exact) - (other[i] - log_other)) : 0; // a logit may be -INFINITY
    }
    return std::max(0.0, kl); // rounding
}

double spac_entropy(const float * logits, size_t n) {
    const double max = *std::max_element(logits, logits + n);
    double       sum = 0, weighted = 0;
    for (size_t i = 0; i < n; i++) {
        const double z = logits[i] - max, e = std::exp(z);
        sum += e;
        weighted += e > 0 ? e * z : 0;
    }
    return std::log(sum) - weighted / sum;
}

spac_exact_sample::spac_exact_sample(llama_context * ctx, double max_kl, double price, size_t max_batch) :
    limit(max_kl, price), ctx(ctx), max_batch(std::min<size_t>(max_batch, llama_n_ubatch(ctx))) {
    const llama_model * model = llama_get_model(ctx);
    if (llama_model_is_recurrent(model) || llama_model_is_hybrid(model)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "PYSPAC_MAX_KL (--max-kl) needs a model without recurrent layers, whose last tokens can be "
                                                       "computed twice: omit it");
    }
}

size_t spac_exact_sample::n_lossy(const llama_batch_ext & batch) const {
    return std::count_if(batch.tokens.begin(), batch.tokens.end(), [&](const auto & t) { return !t.seq_ids.empty() && may_be_lossy(*t.seq_ids.begin()); });
}

// a wide batch is exact by itself, and that of an image is not computed twice
int32_t spac_exact_sample::process(llama_batch_ext * batch) {
    const size_t n = batch->tokens.size() <= max_batch ? n_lossy(*batch) : 0;
    if (n == 0) {
        return pass(batch, true, true);
    }
    const spac_kl_limit::way way      = limit.choose(n);
    const bool               has_embd = std::any_of(batch->tokens.begin(), batch->tokens.end(), [](const auto & t) { return t.has_embd; });
    const int32_t            status   = way == spac_kl_limit::BOTH && !has_embd ? both(batch) : pass(batch, way != spac_kl_limit::LOSSY, true);
    if (way == spac_kl_limit::LOSSY && status == 0) {
        limit.add_lossy(units(*batch, n));
    }
    end_batch();
    return status;
}

// tokens without logits, of a short prompt, count as the others; where none has any, as 1 nat each
double spac_exact_sample::units(const llama_batch_ext & batch, size_t n_lossy) const {
    const size_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    double       entropy = 0;
    size_t       n       = 0;
    for (int32_t i = 0; i < (int32_t) batch.tokens.size(); i++) {
        const auto &  t      = batch.tokens[i];
        const float * logits = t.output && may_be_lossy(*t.seq_ids.begin()) ? llama_get_logits_ith(ctx, i) : nullptr;
        entropy += logits ? spac_entropy(logits, n_vocab) : 0;
        n += logits != nullptr;
    }
    const double share = take_share_left_out(); // of a graph that has ended, as its logits are there
    return share * share * n_lossy * (n ? entropy / n : 1);
}

int32_t spac_exact_sample::pass(llama_batch_ext * batch, bool is_exact, bool is_counted) const {
    begin_pass(is_exact, is_counted);
    take_share_left_out(); // of what was before
    return llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
}

int32_t spac_exact_sample::both(llama_batch_ext * batch) {
    if (const int32_t status = pass(batch, false, false)) {
        return status;
    }
    const size_t     n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    std::vector<row> rows;
    for (int32_t i = 0; i < (int32_t) batch->tokens.size(); i++) {
        const auto & t = batch->tokens[i];
        if (t.output && may_be_lossy(*t.seq_ids.begin())) {
            const float * logits = llama_get_logits_ith(ctx, i);
            rows.push_back({ i, std::vector<float>(logits, logits ? logits + n_vocab : logits) });
        }
    }
    const double share = take_share_left_out();
    if (!take_back(*batch)) {
        spac_log("max-kl: the cache does not give back the last %zu tokens", batch->tokens.size());
        return -3;
    }
    const int32_t status = pass(batch, true, true);
    for (const row & r : rows) {
        const float * logits = status == 0 && !r.logits.empty() ? llama_get_logits_ith(ctx, r.index) : nullptr;
        if (logits) {
            limit.add_sample(spac_kl_divergence(logits, r.logits.data(), n_vocab), share * share * spac_entropy(r.logits.data(), n_vocab));
        }
    }
    return status;
}

// a batch's tokens are the last ones of their sequences
bool spac_exact_sample::take_back(const llama_batch_ext & batch) const {
    std::map<llama_seq_id, llama_pos> first;
    for (const auto & t : batch.tokens) {
        for (const llama_seq_id seq : t.seq_ids) {
            const auto it = first.emplace(seq, t.pos[0]).first;
            it->second    = std::min(it->second, t.pos[0]);
        }
    }
    return std::all_of(first.begin(), first.end(), [&](const auto & f) { return llama_memory_seq_rm(llama_get_memory(ctx), f.first, f.second, -1); });
}
