#include "baseline.h"

#include "base/status.h"
#include "eviction.h"

#include <algorithm>
#include <array>

static const std::array<std::string, 3> MISSES    = { "fetch", "balance", "host-admit" }; // as miss_kind
static const std::string                PER_LAYER = "+per-layer";

static std::string joined(const std::vector<std::string> & names) {
    std::string text;
    for (const std::string & name : names) {
        text += (text.empty() ? "" : ", ") + name;
    }
    return text;
}

spac_baseline::spac_baseline(const char * name, const std::string & text) {
    if (text.empty()) {
        return;
    }
    per_layer               = text.size() > PER_LAYER.size() && text.compare(text.size() - PER_LAYER.size(), std::string::npos, PER_LAYER) == 0;
    const std::string both  = text.substr(0, text.size() - (per_layer ? PER_LAYER.size() : 0));
    const size_t      plus  = both.find('+');
    const std::string first = both.substr(0, plus), second = plus == std::string::npos ? "" : both.substr(plus + 1);
    const auto        it = std::find(MISSES.begin(), MISSES.end(), second);
    if (it == MISSES.end() || !spac_eviction::is_known(first)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s cannot be '%s': give EVICTION+MISS, EVICTION one of %s, MISS one of %s; %s behind it gives each layer slots of its own", name, text.c_str(),
                                     joined(spac_eviction::names()).c_str(), joined({ MISSES.begin(), MISSES.end() }).c_str(), PER_LAYER.c_str()));
    }
    eviction = first;
    miss     = (miss_kind) (it - MISSES.begin());
    if (is_scheduled() && miss == HOST_ADMIT) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s cannot be '%s': a scheduler says what comes; give fetch or balance", name, text.c_str()));
    }
}

bool spac_baseline::is_scheduled() const {
    return spac_eviction::is_by_utility(eviction);
}
