#include "env-values.h"

#include "base/engine-params.h"
#include "base/status.h"
#include "cache/baseline.h"
#include "split/lossy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>

int32_t spac_read_n_tokens(const std::string & name, const std::string & text, int32_t max) {
    char *     end = nullptr;
    const long n   = strtol(text.c_str(), &end, 10);
    if (end == text.c_str() || *end || n < 1 || n > max) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s \"%s\": give a number of tokens from 1 to %d", name.c_str(), text.c_str(), max));
    }
    return (int32_t) n;
}

double spac_read_max_kl(const std::string & name, const std::string & text) {
    double x = 0;
    if (!spac_read_number(text, 1e-6, 100, x)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s \"%s\": give a mean KL divergence in nats per token, from 0.000001 to 100", name.c_str(), text.c_str()));
    }
    return x;
}

int32_t spac_read_host_kernels(const std::string & name, const std::string & text) {
    const char * names[] = { "auto", "spac", "ggml" }; // index = spac_host_kernels
    for (int32_t i = 0; i < 3; i++) {
        if (text == names[i]) {
            return i;
        }
    }
    throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s \"%s\": give auto, spac or ggml", name.c_str(), text.c_str()));
}

bool spac_read_switch(const std::string & name, const std::string & text) {
    if (text != "0" && text != "1") {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s \"%s\": give 0 or 1", name.c_str(), text.c_str()));
    }
    return text == "1";
}

void spac_read_copy_speeds(const std::string & name, const std::string & text, spac_engine_params & params) {
    std::istringstream  numbers(text);
    std::vector<double> found;
    for (std::string one; std::getline(numbers, one, ',');) {
        double n = 0;
        if (!spac_read_number(one, 0, 1e6, n) || found.size() == SPAC_N_DEVICES) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s \"%s\": give a speed in 1e9 bytes/s, or with commas one for each device", name.c_str(), text.c_str()));
        }
        found.push_back(n);
    }
    if (found.size() == 1) {
        params.copy_gb_s = found[0];
    } else {
        std::copy(found.begin(), found.end(), params.device_copy_gb_s);
    }
}

// of text such as "draft-gate:cutoff=20:critical=1"
static spac_gate_limits gate_limits_of(const std::string & name, const std::string & text) {
    spac_gate_limits   limits;
    std::istringstream knobs(text);
    std::string        one;
    for (std::getline(knobs, one, ':'); std::getline(knobs, one, ':');) {
        char end    = 0;
        bool is_set = sscanf(one.c_str(), "cutoff=%d%c", &limits.cutoff, &end) == 1 && limits.cutoff >= 0;
        is_set      = is_set || (sscanf(one.c_str(), "critical=%d%c", &limits.n_critical, &end) == 1 && limits.n_critical > 0);
        if (!is_set) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%s: draft-gate knows no \"%s\": give cutoff=N, the number of layers that are copied "
                                                                       "for, or critical=N, of experts of each, from 1 on",
                                                                       name.c_str(),
                                                                       one.c_str()));
        }
    }
    return limits;
}

spac_predictors spac_read_predictors(const std::string & name, const std::string & text) {
    const std::string  known[] = { "none", "draft-gate", "next-layer", "next-layer-2", "next-layer-3" };
    spac_predictors    found;
    std::istringstream names(text);
    for (std::string one; std::getline(names, one, ',');) {
        if (one.rfind("draft-gate:", 0) == 0) {
            found.limits     = gate_limits_of(name, one);
            found.draft_gate = true;
            continue;
        }
        const int32_t i = (int32_t) (std::find(std::begin(known), std::end(known), one) - std::begin(known));
        if (i == (int32_t) std::size(known) || (found.next_layer && i >= 2 && i - 1 != found.next_layer)) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                             spac_format("%s \"%s\": give one of next-layer, next-layer-2 and next-layer-3, draft-gate, or both, or none", name.c_str(), text.c_str()));
        }
        found.next_layer = i >= 2 ? i - 1 : found.next_layer;
        found.draft_gate = found.draft_gate || i == 1;
    }
    return found;
}

// ---- the C interface

typedef void (*spac_value_check)(const std::string & name, const std::string & text);

static const struct {
    const char *     variable;
    spac_value_check check;
} CHECKS[] = {
    { "PYSPAC_BASELINE",     [](const std::string & name, const std::string & text) { spac_baseline(name.c_str(), text); }              },
    { "PYSPAC_COPY_GB_S",
     [](const std::string & name,                         const std::string & text) {
          spac_engine_params params = {};
          spac_read_copy_speeds(name, text, params);
      }                                                                                                },
    { "PYSPAC_CPU_RANGE",    [](const std::string &,      const std::string & text) { spac_parse_cpu_range(text); }                     },
    { "PYSPAC_EVICT",        [](const std::string & name, const std::string & text) { spac_read_switch(name, text); }                   },
    { "PYSPAC_FILL",         [](const std::string & name, const std::string & text) { spac_read_switch(name, text); }                   },
    { "PYSPAC_HOST_KERNELS", [](const std::string & name, const std::string & text) { spac_read_host_kernels(name, text); }             },
    { "PYSPAC_LOSSY",        [](const std::string & name, const std::string & text) { spac_lossy::read(name.c_str(), text); }           },
    { "PYSPAC_MASKS",        [](const std::string & name, const std::string & text) { spac_read_n_tokens(name, text, SPAC_DRAFT_MAX); } },
    { "PYSPAC_MAX_BATCH",    [](const std::string & name, const std::string & text) { spac_read_n_tokens(name, text, SPAC_MAX_BATCH); } },
    { "PYSPAC_MAX_KL",       [](const std::string & name, const std::string & text) { spac_read_max_kl(name, text); }                   },
    { "PYSPAC_NGRAM",        [](const std::string & name, const std::string & text) { spac_read_n_tokens(name, text, SPAC_DRAFT_MAX); } },
    { "PYSPAC_PREDICT",      [](const std::string & name, const std::string & text) { spac_read_predictors(name, text); }               },
    { "PYSPAC_STAGE",        [](const std::string & name, const std::string & text) { spac_read_switch(name, text); }                   },
};

spac_status spac_check_value(const char * variable, const char * name, const char * text) {
    return spac_guard([&] {
        if (!variable || !name || !text) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "spac_check_value: no variable, no name, or no text");
        }
        for (const auto & one : CHECKS) {
            if (strcmp(one.variable, variable) == 0) {
                one.check(name, text);
            }
        }
    });
}
