// Which way prompts go, by the times of a machine that is made up.
#include "check.h"
#include "untried/prompt-way.h"

static constexpr double WIDTH = 512;

// n batches; staged_us, stock_us: of each; returns how many of them were staged
static int run(spac_prompt_way & way, int n, uint64_t staged_us, uint64_t stock_us, double width = WIDTH) {
    static uint64_t now      = 1;
    int             n_staged = 0;
    for (int i = 0; i < n; i++) {
        way.choose(false, true, (int64_t) width);
        way.begin((int64_t) width, now);
        now += way.is_staged ? staged_us : stock_us;
        way.note_layer(0, now - 1); // another layer, before
        way.note_layer(way.last_il, now);
        n_staged += way.is_staged;
    }
    return n_staged;
}

int main() {
    spac_prompt_way way;
    way.last_il = 3;

    // both are tried, then the faster one is taken: at most 2 % of the time, and one trial, go to the other
    CHECK(run(way, 4, 1000, 1500) == 2);
    const int n = run(way, 1000, 1000, 1500);
    CHECK(n < 1000 && (1000 - n) * 500 <= 0.02 * 1000 * 1000 + 1000);

    // the machine changes: it is noticed, and the other way is taken
    run(way, 1000, 4000, 1500);
    CHECK(run(way, 100, 4000, 1500) <= 2);
    // other widths are another matter
    CHECK(run(way, 4, 100, 200, 64) == 2 && run(way, 20, 100, 200, 64) >= 19);

    // who must, or may not
    way.choose(true, true, 512);
    CHECK(way.is_staged);
    way.choose(false, false, 512);
    CHECK(!way.is_staged);

    // a graph that was given up is not measured, nor one that was not announced
    spac_prompt_way given_up;
    given_up.last_il = 3;
    given_up.begin(512, 0);
    given_up.note_layer(3, 10);
    return 0;
}
