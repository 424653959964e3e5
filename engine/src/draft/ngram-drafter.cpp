#include "ngram-drafter.h"

#include <algorithm>

static constexpr size_t  N_PAIR   = 2;  // tokens of the shortest match
static constexpr int32_t N_LOOKED = 64; // places of a pair, the latest ones: of a newline there are thousands

static uint64_t pair_before(const std::vector<int32_t> & tokens, size_t place) {
    return (uint64_t) (uint32_t) tokens[place - 2] << 32 | (uint32_t) tokens[place - 1];
}

int32_t spac_ngram_drafter::draft(int32_t slot, const int32_t * tokens, int32_t n_tokens, int32_t id_last, int32_t n_max, const int32_t ** drafted) {
    slots.resize(std::max(slots.size(), (size_t) slot + 1));
    sequence & s = slots[slot];
    n_max        = std::min(n_max, n_draft_max);
    s.follow(tokens, n_tokens, id_last);
    s.tell_passed();
    s.n_matched = s.match();
    s.drafted.clear();
    if (s.n_matched > 0) {
        const int32_t n_limit = limit(slot, s.n_matched);
        s.copy(n_limit >= 0 ? std::min(n_limit, n_max) : n_max);
    }
    *drafted = s.drafted.data();
    return (int32_t) s.drafted.size();
}

// the sequence is what it was, and some tokens more, unless the slot has another one, or has shifted
void spac_ngram_drafter::sequence::follow(const int32_t * given, int32_t n_given, int32_t id_last) {
    const size_t n_most = std::min(tokens.size(), (size_t) n_given);
    const size_t n_same = (size_t) (std::mismatch(given, given + n_most, tokens.begin()).first - given);
    if (n_same < tokens.size()) {
        for (size_t place = before.size(); place-- > std::max(n_same, N_PAIR);) { // the latest ones, which are first in their chains
            latest[pair_before(tokens, place)] = before[place];
        }
        before.resize(std::min(before.size(), std::max(n_same, N_PAIR)));
        tokens.resize(n_same);
        distance = n_passed = 0;
    }
    tokens.insert(tokens.end(), given + n_same, given + n_given);
    tokens.push_back(id_last);
    before.resize(std::max(before.size(), std::min(tokens.size(), N_PAIR)));
    while (before.size() < tokens.size()) { // places with a token behind them
        int32_t & place = latest[pair_before(tokens, before.size())];
        before.push_back(place);
        place = (int32_t) before.size() - 1;
    }
}

void spac_ngram_drafter::sequence::tell_passed() {
    if (n_passed > 0) {
        news     = tokens[at_passed] == next_passed ? n_passed : -n_passed;
        n_passed = 0;
    }
}

// how many of the last tokens match before the source, which is found; 0: there is none
int32_t spac_ngram_drafter::sequence::match() {
    const size_t end    = tokens.size();
    int32_t      n      = 0;
    size_t       source = 0;
    const auto   look   = [&](size_t place) {
        if (const int32_t n_here = n_matched_at(place); n_here > n) {
            n      = n_here;
            source = place;
        }
    };
    const auto found = end > N_PAIR ? latest.find(pair_before(tokens, end)) : latest.end();
    int32_t    place = found != latest.end() ? found->second : 0;
    for (int32_t i = 0; place > 0 && i < N_LOOKED && n < SPAC_N_MATCHED_MAX; i++, place = before[place]) {
        look(place);
    }
    if (source > 0 && distance > 0 && (size_t) distance < end) { // where the last draft was copied from
        look(end - distance);
    }
    distance = source > 0 ? (int32_t) (end - source) : 0;
    return n;
}

int32_t spac_ngram_drafter::sequence::n_matched_at(size_t place) const {
    const int32_t n_most = (int32_t) std::min<size_t>(place, SPAC_N_MATCHED_MAX);
    int32_t       n      = 0;
    while (n < n_most && tokens[place - 1 - n] == tokens[tokens.size() - 1 - n]) {
        n++;
    }
    return n;
}

// what follows the source; where that comes to the end of the text, the draft itself is copied
void spac_ngram_drafter::sequence::copy(int32_t n) {
    const size_t source = tokens.size() - distance;
    for (int32_t i = 0; i < n; i++) {
        drafted.push_back(i < distance ? tokens[source + i] : drafted[i - distance]);
    }
    if (n == 0) {
        n_passed    = n_matched;
        at_passed   = tokens.size();
        next_passed = tokens[source];
    }
}

void spac_ngram_drafter::forget(int32_t slot) {
    if ((size_t) slot < slots.size()) {
        slots[slot].n_passed = 0;
    }
}

void spac_ngram_drafter::end_step(int32_t slot, spac_step_record & record) {
    if ((size_t) slot < slots.size()) {
        record.n_matched      = slots[slot].n_matched;
        record.n_passed_over  = slots[slot].news;
        slots[slot].n_matched = slots[slot].news = 0;
    }
}
