// Which experts are left out: by hand, with ties, negative weights and batches that are computed whole; and texts that name no rule.
#include "base/status.h"
#include "split/cache-routing.h"
#include "split/lossy.h"

#undef NDEBUG
#include <cassert>
#include <cmath>
#include <cstdio>

static ggml_tensor weights_of(std::vector<float> & data, int64_t n_used) {
    ggml_tensor t = {};
    t.type        = GGML_TYPE_F32;
    t.ne[0]       = 1;
    t.ne[1]       = n_used;
    t.ne[2]       = (int64_t) data.size() / n_used;
    t.nb[0] = t.nb[1] = sizeof(float);
    t.nb[2]           = n_used * sizeof(float);
    t.data            = data.data();
    return t;
}

// two tokens with three experts each: the first has its second best and its worst absent, the other all of them
static void test_ranks() {
    std::vector<float> w = { 0.2f, 0.5f, 0.3f, /**/ 0.6f, 0.1f, 0.3f };
    const ggml_tensor  t = weights_of(w, 3);

    spac_lossy one("drop:1");
    one.choose(t, { 0, 1, 0, /**/ 0, 0, 0 }, 2);
    assert((one.copy_of == std::vector<uint8_t>{ 1, 0, 1, /**/ 0, 1, 1 }));
    assert(one.n_left_out == 4);
    assert(std::fabs(one.weight - 2.0) < 1e-6 && std::fabs(one.weight_kept - 1.1) < 1e-6);

    spac_lossy two("drop:2");
    two.choose(t, { 0, 1, 0, /**/ 0, 0, 0 }, 2);
    assert((two.copy_of == std::vector<uint8_t>{ 1, 0, 0, /**/ 0, 1, 0 }));

    two.choose(t, { 0, 1, 0, /**/ 0, 0, 0 }, 1); // the second token is not counted, and left out all the same
    assert(two.n_left_out == 1 && two.copy_of[4] && std::fabs(two.weight - 1.0) < 1e-6);

    spac_lossy all("drop:3");
    all.choose(t, { 0, 0, 0, 0, 0, 0 }, 2);
    assert(all.n_left_out == 0 && all.weight == all.weight_kept);
}

// of three tokens the second is of a request that wants all; the third is of nobody's
static void test_requests() {
    std::vector<float> w = { 0.2f, 0.8f, /**/ 0.2f, 0.8f, /**/ 0.2f, 0.8f };
    spac_lossy         lossy("drop:1");
    assert(lossy.share_kept(4) < 0);
    lossy.begin_request(4, false);
    lossy.begin_request(7, true);
    assert(lossy.share_kept(4) == 1 && lossy.share_kept(7) == 1); // so far
    lossy.choose(weights_of(w, 2), std::vector<uint8_t>(6), 3, { 4, 7, -1 });
    assert((lossy.copy_of == std::vector<uint8_t>{ 1, 0, 0, 0, 1, 0 }));
    assert(std::fabs(lossy.share_kept(4) - 0.8) < 1e-6 && lossy.share_kept(7) == 1 && lossy.share_kept(-1) < 0);
    assert(lossy.n_left_out == 2);

    lossy.begin_request(7, false); // another request on the same slot
    lossy.choose(weights_of(w, 2), std::vector<uint8_t>(6), 3, { 7, 7, 7 });
    assert(lossy.n_left_out == 3 && std::fabs(lossy.share_kept(7) - 0.8) < 1e-6);
    assert(spac_lossy("").share_kept(4) < 0);
}

static void test_ties_and_signs() {
    std::vector<float> w = { 0.25f, 0.25f, -0.9f, 0.25f };
    spac_lossy         lossy("drop:2");
    lossy.choose(weights_of(w, 4), { 0, 0, 0, 0 }, 1);
    assert((lossy.copy_of == std::vector<uint8_t>{ 0, 1, 0, 1 })); // the largest, and the first of those that are equal
    lossy.choose(weights_of(w, 4), { 1, 1, 1, 1 }, 0);             // not counted: seen all the same
    assert(std::fabs(lossy.take_share_left_out() - 0.5 / 3.3) < 1e-6 && lossy.take_share_left_out() == 0);
}

// four experts that are not there, and one that is: the best, those of one copy after the other, and what is left
static void test_copies() {
    std::vector<float>         w    = { 0.1f, 0.5f, 0.05f, 0.3f, 0.05f };
    const ggml_tensor          t    = weights_of(w, 5);
    const std::vector<uint8_t> none = { 0, 0, 0, 0, 1 };
    const auto                 of   = [&](const char * text) {
        spac_lossy lossy(text);
        lossy.choose(t, none, 1, {}, { 0, 1, 2, 3, 4 });
        return lossy.copy_of;
    };
    assert((of("lowbit:1:a") == std::vector<uint8_t>{ 1, 0, 1, 1, 0 }));
    assert((of("lowbit:0:a") == std::vector<uint8_t>{ 1, 1, 1, 1, 0 }));
    assert((of("lowbit:5:a") == std::vector<uint8_t>{ 0, 0, 0, 0, 0 }));
    assert((of("lowbit:1:a:b") == std::vector<uint8_t>{ 2, 0, 2, 1, 0 }));
    assert((of("lowbit:1:a:b:drop") == std::vector<uint8_t>{ 2, 0, 3, 1, 0 }));
    assert((of("lowbit:2:a:drop") == std::vector<uint8_t>{ 1, 0, 1, 0, 0 }));

    spac_lossy lossy("lowbit:1:a:drop");
    lossy.choose(t, none, 1, {}, { 0, 1, 2, 3, 4 });
    assert(!lossy.is_left_out(1) && !lossy.is_left_out(3) && lossy.is_left_out(0) && lossy.is_left_out(2));
    assert(lossy.n_left_out == 3 && std::fabs(lossy.weight_kept - 0.55) < 1e-6);
    assert(lossy.copies() == std::vector<std::string>{ "a" } && spac_lossy("drop:1").copies().empty());
    assert(spac_lossy("drop:1").is_on() && !lossy.substitutes() && !lossy.routes());
}

// what is exact for one token is for all: here of the second token's best, and of one that wants all
static void test_copies_of_several_tokens() {
    std::vector<float> w = { 0.9f, 0.1f, /**/ 0.2f, 0.8f, /**/ 0.6f, 0.4f };
    spac_lossy         lossy("lowbit:1:a");
    lossy.choose(weights_of(w, 2), std::vector<uint8_t>(6), 3, {}, { 3, 7, /**/ 5, 7, /**/ 3, -1 });
    assert((lossy.copy_of == std::vector<uint8_t>{ 0, 0, /**/ 1, 0, /**/ 0, 1 }));
    assert(lossy.n_left_out == 2 && std::fabs(lossy.weight_kept - 2.4) < 1e-6);

    lossy.begin_request(1, false);
    lossy.begin_request(2, true);
    lossy.choose(weights_of(w, 2), std::vector<uint8_t>(6), 3, { 1, 1, 2 }, { 0, 1, /**/ 2, 3, /**/ 1, 2 });
    assert((lossy.copy_of == std::vector<uint8_t>(6, 0)));
    assert(lossy.share_kept(1) == 1);
}

static void test_substitutes() {
    spac_lossy lossy("substitute:0.1");
    assert(lossy.substitutes() && !spac_lossy("drop:1").substitutes());
    for (float w : { 0.5f, 0.3f, -0.4f }) {
        lossy.rate(7, 4, 0, w); // 0.4 in the mean
    }
    lossy.rate(7, 4, 1, 0.35f);
    lossy.rate(7, 4, 2, 0.45f);
    std::vector<int32_t> spare = { 2, 1, 3 };
    const int32_t        first = lossy.take_alike(7, 0, spare); // both are equally near
    assert((first == 1 || first == 2) && spare.size() == 2);
    assert(lossy.take_alike(7, 0, spare) == 3 - first);
    assert(lossy.take_alike(7, 0, spare) == -1 && spare == std::vector<int32_t>{ 3 }); // that one was never chosen
    assert(lossy.take_alike(7, 3, spare) == -1 && lossy.take_alike(8, 0, spare) == -1);

    spac_lossy none("substitute:0");
    spare = { 1 };
    assert(none.take_alike(7, 0, spare) == -1);

    std::vector<float> w = { 0.9f, 0.1f };
    lossy.choose(weights_of(w, 2), { 0, 1 }, 1); // the best one, too
    assert((lossy.copy_of == std::vector<uint8_t>{ 1, 0 }) && std::fabs(lossy.weight_kept - 0.1) < 1e-6);
}

// by 0.5 of the range, which is 2: the second expert, which is there, overtakes the first
static void test_routes() {
    spac_cache_routing   routing(0.5);
    const float          z[]      = { 1.0f, 0.5f, -1.0f, 0.9f };
    const int32_t        wanted[] = { 0, 3 };
    int32_t              chosen[2];
    std::vector<uint8_t> is_there = { 0, 1, 1, 0 };
    routing.choose(z, is_there, wanted, 2, chosen);
    assert(chosen[0] == 0 && chosen[1] == 3); // no logits were seen before
    routing.learn(z, 4);
    routing.choose(z, is_there, wanted, 2, chosen);
    assert(chosen[0] == 1 && chosen[1] == 0);
    assert(std::fabs(spac_cache_routing::share_kept(z, wanted, chosen, 2) - (std::exp(1.0) + std::exp(0.5)) / (std::exp(1.0) + std::exp(0.9))) < 1e-6);
    const int32_t other[] = { 3, 0 }; // in whatever order
    routing.choose(z, { 1, 0, 0, 1 }, other, 2, chosen);
    assert(chosen[0] == 3 && chosen[1] == 0);
    routing.choose(z, { 0, 0, 1, 1 }, other, 2, chosen); // the same two are best
    assert(chosen[0] == 3 && chosen[1] == 0);

    spac_cache_routing none(0);
    none.learn(z, 4);
    none.choose(z, is_there, wanted, 2, chosen);
    assert(chosen[0] == 0 && chosen[1] == 3);
    assert(spac_lossy("route:0.2").routes() && spac_lossy("route:0.2").strength() == 0.2 && spac_lossy("route:0").is_on());
}

static void test_whole() {
    spac_lossy lossy("drop:1");
    lossy.keep_all(5);
    assert(lossy.copy_of == std::vector<uint8_t>(5, 0));
    assert(!spac_lossy("").is_on() && lossy.is_on());
}

static void test_refusals() {
    for (const char * text : { "lowbit", "lowbit:", "lowbit:1", "lowbit:1:", "lowbit:-1:a", "lowbit:x:a", "lowbit:1.5:a", "lowbit::a", "lowbit:1:drop", "lowbit:1:drop:a", "lowbit:1:a:", "lowbit:1::a", "lowbit:0:a:b", "lowbit:0:a:drop", "lowbit:1:a:b:c:d:e:f:g:h:i", "drop", "drop:", "drop:0", "drop:-1", "drop:x", "drop:1x", "drop:99999", "drop: 2", "drop:+2", "drop:1.5", "drop:1.", "substitute", "substitute:", "substitute:-0.1", "substitute:1.5", "substitute:nan", "substitute:1e-3", "keep:2", " drop:2", "route", "route:", "route:-0.1", "route:1.5", "route:x" }) {
        bool refused = false;
        try {
            spac_lossy lossy(text);
        } catch (const spac_error & e) {
            refused = e.status == SPAC_STATUS_INVALID_ARGUMENT;
        }
        if (!refused) {
            printf("\"%s\" was taken\n", text);
        }
        assert(refused);
    }
}

int main() {
    test_ranks();
    test_requests();
    test_ties_and_signs();
    test_copies();
    test_copies_of_several_tokens();
    test_substitutes();
    test_routes();
    test_whole();
    test_refusals();
    return 0;
}
