// Drafts from what stood in the text before: the longest match, several slots, and sequences that change.
#include "check.h"
#include "draft/ngram-drafter.h"

#include <array>
#include <random>

using tokens = std::vector<int32_t>;

// behind the last of `text`
static tokens draft(spac_ngram_drafter & drafter, int32_t slot, const tokens & text, int32_t n_max) {
    const int32_t * drafted = nullptr;
    const int32_t   n       = drafter.draft(slot, text.data(), (int32_t) text.size() - 1, text.back(), n_max, &drafted);
    CHECK(n <= n_max);
    return tokens(drafted, drafted + n);
}

static spac_step_record end_step(spac_ngram_drafter & drafter, int32_t slot) {
    spac_step_record record = {};
    drafter.end_step(slot, record);
    return record;
}

static tokens joined(std::initializer_list<tokens> parts) {
    tokens all;
    for (const tokens & part : parts) {
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

static void test_longest_match() {
    spac_ngram_drafter drafter(8);
    CHECK(draft(drafter, 0, { 1 }, 4).empty() && draft(drafter, 0, { 1, 2 }, 4).empty() && draft(drafter, 0, { 1, 2, 3 }, 4).empty());
    CHECK(end_step(drafter, 0).n_matched == 0);
    // of two places the one with more of the same tokens before it, not the latest
    const tokens text = { 7, 8, 9, 50, 51, 52, 3, 8, 9, 60, 61, 62, 7, 8, 9 };
    CHECK(draft(drafter, 1, text, 3) == (tokens{ 50, 51, 52 }));
    CHECK(end_step(drafter, 1).n_matched == 3);
    CHECK(end_step(drafter, 1).n_matched == 0); // of a step that asked for no drafts
    // of two equal ones the latest
    CHECK(draft(drafter, 2, { 8, 9, 50, 8, 9, 60, 1, 8, 9 }, 1) == (tokens{ 60 }));
    // a single token is no match
    CHECK(draft(drafter, 3, { 8, 9, 50, 1, 9 }, 2).empty());
    CHECK(draft(drafter, 1, text, 100).size() == 8); // its own limit
}

static void test_end_of_text_repeats_the_draft() {
    spac_ngram_drafter drafter(16);
    CHECK(draft(drafter, 0, { 1, 2, 3, 1, 2, 3 }, 7) == (tokens{ 1, 2, 3, 1, 2, 3, 1 }));
    CHECK(draft(drafter, 1, { 5, 5, 5 }, 3) == (tokens{ 5, 5, 5 }));
    // long matches are alike
    CHECK(draft(drafter, 2, tokens(500, 4), 2) == (tokens{ 4, 4 }) && end_step(drafter, 2).n_matched == SPAC_N_MATCHED_MAX);
}

// beyond the places that are looked at the last source goes on
static void test_source_goes_on() {
    spac_ngram_drafter drafter(2);
    const tokens       rare = { 1, 2, 3, 4, 9, 9, 5, 6 };
    tokens             text = rare;
    for (int32_t i = 0; i < 100; i++) {
        text.insert(text.end(), { 9, 9, 100 + i });
    }
    text.insert(text.end(), { 1, 2, 3, 4 });
    CHECK(draft(drafter, 0, text, 2) == (tokens{ 9, 9 }));
    text.insert(text.end(), { 9, 9 });
    CHECK(draft(drafter, 0, text, 2) == (tokens{ 5, 6 }));
    CHECK(end_step(drafter, 0).n_matched == 6);
}

// any text that another one takes the place of, slot by slot: as if it had been there from the beginning
static void test_changed_sequences() {
    std::mt19937       rng(1);
    spac_ngram_drafter drafter(4);
    tokens             texts[4] = { { 1 }, { 2 }, { 3 }, { 4 } };
    for (int32_t i = 0; i < 3000; i++) {
        const int32_t slot = (int32_t) (rng() % 4);
        tokens &      text = texts[slot];
        if (rng() % 20 == 0) { // begins anew, or has lost a part in its middle
            const size_t keep = rng() % text.size();
            const size_t cut  = rng() % 2 ? text.size() : keep + rng() % (text.size() - keep);
            text              = joined({ tokens(text.begin(), text.begin() + keep), tokens(text.begin() + cut, text.end()) });
            drafter.forget(slot);
            drafter.draft(slot, text.data(), (int32_t) text.size(), 5, 0, std::array<const int32_t *, 1>().data());
        }
        for (uint32_t n = 1 + rng() % 3; n > 0; n--) {
            text.push_back((int32_t) (rng() % 4));
        }
        spac_ngram_drafter fresh(4);
        const tokens       drafted = draft(drafter, slot, text, 4), wanted = draft(fresh, 0, text, 4);
        CHECK(drafted.size() == wanted.size());
        const int32_t n = end_step(drafter, slot).n_matched, n_wanted = end_step(fresh, 0).n_matched;
        CHECK(n >= n_wanted); // by the last source it may know a longer one
        CHECK(n > n_wanted || drafted == wanted);
    }
}

static void test_passed_over() {
    spac_ngram_drafter drafter(4);
    drafter.limit = [](int32_t slot, int32_t n_matched) { return slot == 1 ? -1 : n_matched > 2 ? 1
                                                                                                : 0; };
    tokens text   = { 1, 2, 3, 4, 1, 2 };
    CHECK(draft(drafter, 0, text, 4).empty());
    spac_step_record step = end_step(drafter, 0);
    CHECK(step.n_matched == 2 && step.n_passed_over == 0);
    CHECK(draft(drafter, 1, text, 4).size() == 4); // no limit
    text.push_back(3);                             // it would have held
    CHECK(draft(drafter, 0, text, 4) == (tokens{ 4 }));
    step = end_step(drafter, 0);
    CHECK(step.n_matched == 3 && step.n_passed_over == 2);
    text.insert(text.end(), { 4, 9, 1, 2 });
    CHECK(draft(drafter, 0, text, 4).empty() && end_step(drafter, 0).n_passed_over == 0);
    text.insert(text.end(), { 9, 8 });
    CHECK(draft(drafter, 0, text, 4).empty() && end_step(drafter, 0).n_passed_over == -2);
    text.insert(text.end(), { 1, 2 });
    CHECK(draft(drafter, 0, text, 4).empty());
    drafter.forget(0); // the request is over
    text.insert(text.end(), { 3 });
    CHECK(draft(drafter, 0, text, 0).empty() && end_step(drafter, 0).n_passed_over == 0);
}

int main() {
    test_longest_match();
    test_end_of_text_repeats_the_draft();
    test_source_goes_on();
    test_changed_sequences();
    test_passed_over();
    return 0;
}
