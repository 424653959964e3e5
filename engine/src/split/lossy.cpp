#include "lossy.h"

#include "base/status.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

static constexpr char DROP[] = "drop:";

int32_t spac_lossy::read(const char * name, const std::string & text) {
    char *            end    = nullptr;
    const std::string number = text.rfind(DROP, 0) == 0 ? text.substr(sizeof(DROP) - 1) : "";
    const long        n      = strtol(number.c_str(), &end, 10);
    if (number.empty() || *end || number[0] < '0' || number[0] > '9' || n < 1 || n > INT16_MAX) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s cannot be '%s': give drop:N: each token's best N experts, 1 or more, are always computed", name, text.c_str()));
    }
    return (int32_t) n;
}

spac_lossy::spac_lossy(const std::string & text) :
    n_kept(text.empty() ? 0 : read("lossy", text)) {}

// a router may have negative weights, and equal ones: the earlier expert is the better then
static float weight_at(const ggml_tensor & weights, int64_t iu, int64_t it) {
    return std::fabs(*(const float *) ((const char *) weights.data + iu * weights.nb[1] + it * weights.nb[2]));
}

static int64_t rank_of(const ggml_tensor & weights, int64_t iu, int64_t it) {
    const float w    = weight_at(weights, iu, it);
    int64_t     rank = 0;
    for (int64_t other = 0; other < weights.ne[1]; other++) {
        const float v = weight_at(weights, other, it);
        rank += v > w || (v == w && other < iu);
    }
    return rank;
}

void spac_lossy::keep_all(int64_t n_rows) {
    is_left_out.assign(n_rows, 0);
}

void spac_lossy::choose(const ggml_tensor & weights, const std::vector<uint8_t> & is_there, int64_t n_tokens_counted) {
    const int64_t n_used = weights.ne[1], n_tokens = weights.ne[2];
    is_left_out.assign(n_used * n_tokens, 0);
    n_left_out = 0;
    weight = weight_kept = 0;
    for (int64_t it = 0; it < n_tokens; it++) {
        for (int64_t iu = 0; iu < n_used; iu++) {
            const int64_t i = it * n_used + iu;
            is_left_out[i]  = !is_there[i] && rank_of(weights, iu, it) >= n_kept;
            if (it < n_tokens_counted) {
                const float w = weight_at(weights, iu, it);
                n_left_out += is_left_out[i];
                weight += w;
                weight_kept += is_left_out[i] ? 0 : w;
            }
        }
    }
}
