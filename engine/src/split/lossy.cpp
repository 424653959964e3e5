#include "lossy.h"

#include "base/engine-params.h"
#include "base/status.h"

#include <algorithm>
#include <cmath>

// without a sign or an exponent
static bool read_number(const std::string & text, double lowest, double highest, double & number) {
    return text.find_first_not_of("0123456789.") == std::string::npos && spac_read_number(text, lowest, highest, number);
}

spac_lossy::rule spac_lossy::read(const char * name, const std::string & text) {
    const size_t      colon = text.find(':');
    const std::string kind = text.substr(0, colon), strength = colon == std::string::npos ? "" : text.substr(colon + 1);
    double            x = 0;
    if (kind == "drop" && read_number(strength, 1, INT16_MAX, x) && x == std::floor(x) && strength.find('.') == std::string::npos) {
        return { DROP, (int32_t) x, 0, 0 };
    }
    if (kind == "substitute" && read_number(strength, 0, 1, x)) {
        return { SUBSTITUTE, 0, x, 0 };
    }
    if (kind == "route" && read_number(strength, 0, 1, x)) {
        return { ROUTE, 0, 0, x };
    }
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                     spac_format("%s cannot be '%s': give drop:N (each token's best N experts, 1 or more, are always computed), substitute:X (an expert "
                                 "takes another's place if their mean router weights differ by less than X, from 0 to 1) or route:X (routers prefer "
                                 "experts that are there by X, from 0 to 1, of the range of their logits)",
                                 name, text.c_str()));
}

spac_lossy::spac_lossy(const std::string & text) :
    by(text.empty() ? rule() : read("lossy", text)) {}

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

void spac_lossy::begin_request(int32_t sequence, bool is_exact) {
    requests[sequence] = { is_exact };
}

bool spac_lossy::may_leave_out(int32_t sequence) const {
    const auto it = requests.find(sequence);
    return is_on() && (it == requests.end() || !it->second.is_exact);
}

double spac_lossy::share_kept(int32_t sequence) const {
    const auto it = requests.find(sequence);
    if (!is_on() || it == requests.end()) {
        return -1;
    }
    return it->second.weight > 0 ? it->second.weight_kept / it->second.weight : 1.0;
}

void spac_lossy::choose(const ggml_tensor & weights, const std::vector<uint8_t> & is_there, int64_t n_tokens_counted, const std::vector<int32_t> & sequence_of) {
    const int64_t n_used = weights.ne[1], n_tokens = weights.ne[2];
    is_left_out.assign(n_used * n_tokens, 0);
    n_left_out = 0;
    weight = weight_kept = 0;
    for (int64_t it = 0; it < n_tokens; it++) {
        const auto found = (size_t) it < sequence_of.size() ? requests.find(sequence_of[it]) : requests.end();
        request    nobodys;
        request &  r = found != requests.end() ? found->second : nobodys;
        for (int64_t iu = 0; iu < n_used; iu++) {
            const int64_t i = it * n_used + iu;
            is_left_out[i]  = !r.is_exact && !is_there[i] && (substitutes() || rank_of(weights, iu, it) >= by.n_kept);
            const float w   = weight_at(weights, iu, it);
            asked += r.is_exact ? 0 : w;
            left_out += is_left_out[i] ? w : 0;
            if (it < n_tokens_counted) {
                r.weight += w;
                r.weight_kept += is_left_out[i] ? 0 : w;
                n_left_out += is_left_out[i];
                weight += w;
                weight_kept += is_left_out[i] ? 0 : w;
            }
        }
    }
}

double spac_lossy::take_share_left_out() {
    const double share = asked > 0 ? left_out / asked : 0;
    asked = left_out = 0;
    return share;
}

void spac_lossy::count_routed(int32_t sequence, double share, bool is_counted) {
    asked += may_leave_out(sequence) ? 1 : 0;
    left_out += 1 - share;
    if (!is_counted) {
        return;
    }
    weight += 1;
    weight_kept += share;
    if (const auto it = requests.find(sequence); it != requests.end()) {
        it->second.weight += 1;
        it->second.weight_kept += share;
    }
}

void spac_lossy::rate(uint32_t il, int32_t n_expert, int32_t ie, float weight) {
    std::vector<rating> & of_layer = ratings[il];
    of_layer.resize(n_expert);
    of_layer[ie].weight += std::fabs(weight);
    of_layer[ie].n_chosen++;
}

double spac_lossy::rating_of(uint32_t il, int32_t ie) const {
    const auto it = ratings.find(il);
    if (it == ratings.end() || it->second[ie].n_chosen == 0) {
        return INFINITY;
    }
    return it->second[ie].weight / it->second[ie].n_chosen;
}

int32_t spac_lossy::take_alike(uint32_t il, int32_t ie, std::vector<int32_t> & spare) const {
    const double own = rating_of(il, ie);
    if (std::isinf(own)) {
        return -1;
    }
    const auto distance = [&](int32_t other) { return std::fabs(rating_of(il, other) - own); };
    const auto best     = std::min_element(spare.begin(), spare.end(), [&](int32_t a, int32_t b) { return distance(a) < distance(b); });
    if (best == spare.end() || !(distance(*best) < by.tolerance)) {
        return -1;
    }
    const int32_t found = *best;
    spare.erase(best);
    return found;
}
