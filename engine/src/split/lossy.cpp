#include "lossy.h"

#include "base/engine-params.h"
#include "base/status.h"

#include <algorithm>
#include <cmath>
#include <sstream>

// without a sign or an exponent
static bool read_number(const std::string & text, double lowest, double highest, double & number) {
    return text.find_first_not_of("0123456789.") == std::string::npos && spac_read_number(text, lowest, highest, number);
}

static bool read_count(const std::string & text, int32_t lowest, int32_t & n) {
    double x = 0;
    if (text.find('.') != std::string::npos || !read_number(text, lowest, INT16_MAX, x)) {
        return false;
    }
    n = (int32_t) x;
    return true;
}

// N:FILE, N:FILE:FILE and so on, the last of which may be "drop" instead
static bool read_copies(const std::string & text, spac_lossy::rule & rule) {
    std::istringstream parts(text);
    std::string        part;
    std::getline(parts, part, ':');
    if (!read_count(part, 0, rule.n_kept) || text.back() == ':') {
        return false;
    }
    while (std::getline(parts, part, ':')) {
        if (part.empty() || rule.drops) {
            return false;
        }
        rule.drops = part == "drop";
        if (!rule.drops) {
            rule.copies.push_back(part);
        }
    }
    const size_t n_steps = rule.copies.size() + rule.drops;
    return !rule.copies.empty() && rule.copies.size() <= spac_lossy::MAX_COPIES && (rule.n_kept > 0 || n_steps == 1);
}

static const char * const FORMS[] = {
    "drop:N (each token's best N experts, 1 or more, are always computed)",
    "lowbit:N:FILE (the others are computed from FILE, the same model in fewer bits; of FILE:FILE, or FILE:drop, each takes the next N, 1 or more)",
    "substitute:X (an expert takes another's place if their mean router weights differ by less than X, from 0 to 1)",
    "route:X (routers prefer experts that are there by X, from 0 to 1, of the range of their logits)",
};

// how a rule of this kind is written; all of them if there is no such kind
static std::string forms_of(const std::string & kind) {
    std::string all;
    for (const std::string form : FORMS) {
        if (form.compare(0, kind.size() + 1, kind + ":") == 0) {
            return form;
        }
        all += (all.empty() ? "" : ", or ") + form;
    }
    return all;
}

spac_lossy::rule spac_lossy::read(const char * name, const std::string & text) {
    const size_t      colon = text.find(':');
    const std::string kind = text.substr(0, colon), strength = colon == std::string::npos ? "" : text.substr(colon + 1);
    rule              found;
    if (kind == "drop" && read_count(strength, 1, found.n_kept)) {
        found.what = DROP;
    } else if (kind == "lowbit" && read_copies(strength, found)) {
        found.what = LOWBIT;
    } else if (kind == "substitute" && read_number(strength, 0, 1, found.tolerance)) {
        found.what = SUBSTITUTE;
    } else if (kind == "route" && read_number(strength, 0, 1, found.strength)) {
        found.what = ROUTE;
    } else {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s cannot be '%s': give %s", name, text.c_str(), forms_of(kind).c_str()));
    }
    return found;
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
    copy_of.assign(n_rows, 0);
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

uint8_t spac_lossy::copy_for(int64_t rank) const {
    const int64_t last = by.what == LOWBIT ? by.copies.size() + by.drops : 1;
    return (uint8_t) (by.n_kept == 0 ? last : std::min(rank / by.n_kept, last));
}

void spac_lossy::take_best_of_all(const std::vector<int32_t> & index_of) {
    std::vector<uint8_t> best;
    for (size_t i = 0; i < index_of.size(); i++) {
        if (index_of[i] >= 0) {
            best.resize(std::max<size_t>(best.size(), index_of[i] + 1), UINT8_MAX);
            best[index_of[i]] = std::min(best[index_of[i]], copy_of[i]);
        }
    }
    for (size_t i = 0; i < index_of.size(); i++) {
        copy_of[i] = index_of[i] >= 0 ? best[index_of[i]] : copy_of[i];
    }
}

void spac_lossy::choose(const ggml_tensor & weights, const std::vector<uint8_t> & is_there, int64_t n_tokens_counted, const std::vector<int32_t> & sequence_of,
                        const std::vector<int32_t> & index_of) {
    const int64_t n_used = weights.ne[1], n_tokens = weights.ne[2];
    const auto    request_of = [&](int64_t it) { return (size_t) it < sequence_of.size() ? requests.find(sequence_of[it]) : requests.end(); };
    copy_of.assign(n_used * n_tokens, 0);
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        const auto found = request_of(i / n_used);
        if (!is_there[i] && (found == requests.end() || !found->second.is_exact)) {
            copy_of[i] = copy_for(rank_of(weights, i % n_used, i / n_used));
        }
    }
    take_best_of_all(index_of);
    n_left_out = 0;
    weight = weight_kept = 0;
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        const auto   found = request_of(i / n_used);
        const bool   has   = found != requests.end();
        const double w = weight_at(weights, i % n_used, i / n_used), kept = copy_of[i] ? 0 : w;
        asked += has && found->second.is_exact ? 0 : w;
        left_out += w - kept;
        if (i / n_used >= n_tokens_counted) {
            continue;
        }
        n_left_out += copy_of[i] > 0;
        weight += w;
        weight_kept += kept;
        if (has) {
            found->second.weight += w;
            found->second.weight_kept += kept;
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
