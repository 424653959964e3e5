#include "mtp-adapter.h"

#include "base/status.h"

#include "gguf.h"

#include <algorithm>
#include <memory>

using gguf_ptr = std::unique_ptr<gguf_context, decltype(&gguf_free)>;

static const std::string PREFIX = "pyspac.mtp.";

static int64_t find_key(const gguf_context * file, const std::string & path, const std::string & name) {
    const int64_t id = gguf_find_key(file, (PREFIX + name).c_str());
    if (id < 0) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s: the key %s%s is missing: give an adapter with mask tokens", path.c_str(), PREFIX.c_str(), name.c_str()));
    }
    return id;
}

// whole numbers of any width, as 32 bits
static std::vector<uint32_t> read_array(const gguf_context * file, const std::string & path, const std::string & name) {
    const int64_t   id   = find_key(file, path, name);
    const gguf_type type = gguf_get_kv_type(file, id) == GGUF_TYPE_ARRAY ? gguf_get_arr_type(file, id) : GGUF_TYPE_COUNT;
    const bool      wide = type == GGUF_TYPE_INT32 || type == GGUF_TYPE_UINT32;
    if (!wide && type != GGUF_TYPE_UINT16) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s: the key %s%s holds no list of whole numbers: convert the adapter again", path.c_str(), PREFIX.c_str(), name.c_str()));
    }
    const void *          data = gguf_get_arr_data(file, id);
    std::vector<uint32_t> values(gguf_get_arr_n(file, id));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = wide ? ((const uint32_t *) data)[i] : ((const uint16_t *) data)[i];
    }
    return values;
}

static size_t read_number(const gguf_context * file, const std::string & path, const std::string & name) {
    const int64_t id = find_key(file, path, name);
    if (gguf_get_kv_type(file, id) != GGUF_TYPE_UINT32 || gguf_get_val_u32(file, id) == 0) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s: the key %s%s holds no number above 0: convert the adapter again", path.c_str(), PREFIX.c_str(), name.c_str()));
    }
    return gguf_get_val_u32(file, id);
}

static std::vector<ggml_fp16_t> read_halves(const gguf_context * file, const std::string & path, const std::string & name) {
    const std::vector<uint32_t> bits = read_array(file, path, name);
    return { bits.begin(), bits.end() };
}

spac_mtp_adapter::spac_mtp_adapter(const std::string & path) {
    const gguf_ptr file(gguf_init_from_file(path.c_str(), { true, nullptr }), gguf_free);
    if (!file) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, path + ": this is no GGUF file: give an adapter with mask tokens");
    }
    const std::vector<uint32_t> ids = read_array(file.get(), path, "mask_ids");
    mask_ids.assign(ids.begin(), ids.end());
    if (gguf_find_key(file.get(), (PREFIX + "sampler.rank").c_str()) >= 0) {
        rank     = read_number(file.get(), path, "sampler.rank");
        n_top    = read_number(file.get(), path, "sampler.top");
        previous = read_halves(file.get(), path, "sampler.previous");
        next     = read_halves(file.get(), path, "sampler.next");
    }
    if (mask_ids.empty() || (rank > 0 && (previous.size() % rank != 0 || next.size() != previous.size()))) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, path + ": its masks or its sampler are not whole: convert the adapter again");
    }
}

std::vector<spac_guess> spac_mtp_adapter::top(const float * logits, int32_t n_vocab) const {
    std::vector<spac_guess> best(n_vocab);
    for (int32_t i = 0; i < n_vocab; i++) {
        best[i] = { i, logits[i] };
    }
    const size_t n = std::min<size_t>(n_top, best.size());
    std::partial_sort(best.begin(), best.begin() + n, best.end(), [](const spac_guess & a, const spac_guess & b) { return a.score > b.score; });
    best.resize(n);
    return best;
}

llama_token spac_mtp_adapter::choose(const std::vector<spac_guess> & guesses, llama_token previous_token) const {
    const auto better = [&](const spac_guess & a, const spac_guess & b) {
        return a.score + pair_score(previous_token, a.token) < b.score + pair_score(previous_token, b.token);
    };
    return std::max_element(guesses.begin(), guesses.end(), better)->token;
}

float spac_mtp_adapter::pair_score(llama_token a, llama_token b) const {
    if ((std::max(a, b) + 1) * rank > previous.size()) { // without a sampler, too
        return 0;
    }
    float sum = 0;
    for (size_t i = 0; i < rank; i++) {
        sum += ggml_fp16_to_fp32(previous[a * rank + i]) * ggml_fp16_to_fp32(next[b * rank + i]);
    }
    return sum;
}
