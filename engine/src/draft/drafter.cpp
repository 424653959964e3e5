// The ABI of drafters: checks arguments, turns exceptions into a status.
#include "drafter.h"

#include "base/status.h"
#include "common-library.h"

// the sentence is made where it is needed: a token is deferred in every plain step
template <typename... Values>
static void require(bool ok, const char * format, Values... values) {
    if (!ok) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format(format, values...));
    }
}

spac_drafter_params spac_drafter_default_params(void) {
    spac_drafter_params p = {};
    p.n_max               = 8;
    return p;
}

spac_status spac_drafter_types(const char ** names) {
    return spac_guard([&] {
        require(names, "spac_drafter_types: nowhere to put the names");
        *names = ((spac_drafter_types_fn) spac_common_function("spac_drafter_type_names"))();
    });
}

spac_status spac_drafter_open(const spac_drafter_params * params, spac_drafter ** drafter) {
    return spac_guard([&] {
        require(params && drafter, "spac_drafter_open: no parameters, or nowhere to put the drafter");
        *drafter                      = nullptr;
        const spac_drafter_params & p = *params;
        require(p.types && *p.types, "types is empty: name one of llama.cpp's drafters");
        require(p.n_max >= 1 && p.n_max <= SPAC_DRAFT_MAX, "n_max cannot be %d: give 1 to %d", p.n_max, SPAC_DRAFT_MAX);
        require(p.p_min >= 0 && p.p_min <= 1, "p_min cannot be %g: give 0 to 1", p.p_min);
        const auto make = (spac_drafter_make_fn) spac_common_function("spac_drafter_make");
        try {
            *drafter = make(&p);
        } catch (const std::invalid_argument & e) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, e.what());
        }
    });
}

void spac_drafter_close(spac_drafter * drafter) {
    delete drafter;
}

spac_status spac_drafter_begin(spac_drafter * drafter, int32_t * n_keep) {
    return spac_guard([&] {
        require(drafter && n_keep, "spac_drafter_begin: no drafter, or no number of tokens");
        require(*n_keep >= 0, "%d tokens cannot be kept: give 0 or more", *n_keep);
        drafter->n_drafted = 0;
        *n_keep            = drafter->begin(*n_keep);
    });
}

static void require_position(const spac_drafter * drafter, int32_t pos) {
    require(pos >= 0 && pos <= drafter->length(),
            "position %d: the sequence has %d tokens, and none may be left out", pos, drafter->length());
}

static void require_batch(const spac_drafter * drafter, const int32_t * tokens, int32_t n_tokens, int32_t pos) {
    require(drafter && n_tokens >= 0 && (tokens || n_tokens == 0), "spac_drafter_process: no drafter, or no tokens");
    require_position(drafter, pos);
    for (int32_t i = 0; i < n_tokens; i++) {
        require(tokens[i] >= 0, "token %d cannot be processed: it is negative", tokens[i]);
    }
}

spac_status spac_drafter_process(spac_drafter * drafter, const int32_t * tokens, int32_t n_tokens, int32_t pos) {
    return spac_guard([&] {
        require_batch(drafter, tokens, n_tokens, pos);
        drafter->process(tokens, n_tokens, pos);
    });
}

spac_status spac_drafter_defer(spac_drafter * drafter, const int32_t * tokens, int32_t n_tokens, int32_t pos) {
    return spac_guard([&] {
        require_batch(drafter, tokens, n_tokens, pos);
        drafter->defer(tokens, n_tokens, pos);
    });
}

spac_status spac_drafter_draft(spac_drafter * drafter, int32_t token, int32_t pos, int32_t n_max, int32_t * drafted, int32_t * n_drafted) {
    return spac_guard([&] {
        require(drafter && drafted && n_drafted, "spac_drafter_draft: no drafter, or nowhere to put the draft");
        require(token >= 0, "nothing can follow token %d: it is negative", token);
        require_position(drafter, pos);
        *n_drafted = drafter->n_drafted = 0;
        if (n_max > 0) {
            const std::vector<int32_t> found = drafter->draft(token, pos, n_max);
            std::copy(found.begin(), found.end(), drafted);
            *n_drafted = drafter->n_drafted = (int32_t) found.size();
        }
    });
}

spac_status spac_drafter_accept(spac_drafter * drafter, int32_t n_accepted) {
    return spac_guard([&] {
        require(drafter, "spac_drafter_accept: no drafter");
        require(n_accepted >= 0 && n_accepted <= drafter->n_drafted,
                "%d tokens cannot be accepted: %d were drafted", n_accepted, drafter->n_drafted);
        if (drafter->n_drafted > 0) {
            drafter->n_drafted = 0;
            drafter->accept(n_accepted);
        }
    });
}
