// The limit of what a lossy mode costs: its books by hand, and the demo's model beside exact computation, whose divergence is
// measured for every token, on the very text that the lossy one writes.
#include "base/status.h"
#include "check.h"
#include "engine.h"
#include "split/exact-sample.h"

#include "llama-batch.h"
#include "llama.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

// ---- by hand

static void test_divergence() {
    const float p[] = { std::log(0.5f), std::log(0.5f) }, q[] = { 3 + std::log(0.25f), 3 + std::log(0.75f) };
    CHECK(std::fabs(spac_kl_divergence(p, q, 2) - (0.5 * std::log(0.5 / 0.25) + 0.5 * std::log(0.5 / 0.75))) < 1e-6);
    CHECK(spac_kl_divergence(p, p, 2) == 0);
    const float masked[] = { 0, -INFINITY };
    CHECK(std::fabs(spac_kl_divergence(masked, p, 2) - std::log(2)) < 1e-6);
}

static void test_entropy() {
    const float even[] = { 2, 2, 2, 2 }, sure[] = { 0, -INFINITY, -1000, 0 };
    CHECK(std::fabs(spac_entropy(even, 4) - std::log(4)) < 1e-6 && std::fabs(spac_entropy(sure, 4) - std::log(2)) < 1e-6);
}

// a lossy token is seen to cost 0.4, and each earns 0.1: one of 4 * PRICE can be paid
static void test_books() {
    spac_kl_limit limit(0.1);
    int           n_lossy = 0;
    uint64_t      n_early = 0;
    for (; limit.n_samples < spac_kl_limit::N_EARLY; n_early++) {
        const spac_kl_limit::way way = limit.choose(1);
        CHECK(way == spac_kl_limit::BOTH || n_early >= spac_kl_limit::N_FIRST);
        if (way == spac_kl_limit::BOTH) {
            limit.add_sample(0.4, 2);
        } else if (way == spac_kl_limit::LOSSY) {
            n_lossy++;
            limit.add_lossy(2);
        }
    }
    const double n_expected = spac_kl_limit::N_FIRST + (double) (spac_kl_limit::N_EARLY - spac_kl_limit::N_FIRST) * spac_kl_limit::OFTEN;
    CHECK(std::fabs(n_early / n_expected - 1) < 0.1);
    int n[3] = {};
    for (int i = 0; i < 16000; i++) {
        const spac_kl_limit::way way = limit.choose(1 + i % 3);
        n[way]++;
        if (way == spac_kl_limit::BOTH) {
            limit.add_sample(0.4, 2);
        } else if (way == spac_kl_limit::LOSSY) {
            n_lossy += 1 + i % 3;
            limit.add_lossy(2 * (1 + i % 3));
        }
    }
    CHECK(std::abs(n[spac_kl_limit::BOTH] - 1000) < 100 && n[spac_kl_limit::EXACT] > n[spac_kl_limit::LOSSY]);
    CHECK(limit.spent < 0.1 * limit.n_tokens && limit.spent > 0.0985 * limit.n_tokens);
    CHECK(std::fabs(limit.mean - 0.4) < 1e-9 && std::fabs(limit.spent - n_lossy * 0.4 * spac_kl_limit::PRICE) < 1e-6);
    // what costs more in units is paid for longer
    limit.add_lossy(200);
    for (int i = 0; i < 400; i++) {
        CHECK(limit.choose(1) != spac_kl_limit::LOSSY);
    }
}

// every 16th token of a text that repeats itself costs 16 times what its units say of the others: 0.2 in the mean
static void test_a_text_that_repeats_itself() {
    spac_kl_limit limit(100);
    for (int i = 0; i < 32000; i++) {
        const spac_kl_limit::way way = limit.choose(1);
        if (way == spac_kl_limit::BOTH) {
            limit.add_sample(i % 16 == 0 ? 3.2 : 0, 1);
        } else {
            limit.add_lossy(1);
        }
    }
    CHECK(std::fabs(limit.sampled / limit.n_samples - 0.2) < 0.04);
}

static void test_what_is_cheap_is_always_lossy() {
    spac_kl_limit limit(0.1);
    for (int i = 0; i < 8000; i++) {
        const spac_kl_limit::way way = limit.choose(4);
        CHECK(way != spac_kl_limit::EXACT);
        if (way == spac_kl_limit::BOTH) {
            limit.add_sample(i < 4000 ? 0.0 : 0.08, 1);
        } else {
            limit.add_lossy(4);
        }
    }
    // what was not spent is no reserve: dearer ones are exact as soon as they are seen
    for (int i = 0; i < 6400; i++) {
        const spac_kl_limit::way way = limit.choose(4);
        if (way == spac_kl_limit::BOTH) {
            limit.add_sample(5, 1);
        } else if (way == spac_kl_limit::LOSSY) {
            limit.add_lossy(4);
        }
    }
    CHECK(limit.mean > 2 && limit.choose(64) == spac_kl_limit::EXACT);
}

// ---- the demo's model

static llama_model * model;

static llama_context * make_context() {
    llama_context_params params = llama_context_default_params();
    params.n_ctx                = 1024;
    params.n_seq_max            = 2;
    params.kv_unified           = true;
    params.n_threads = params.n_threads_batch = 1;
    llama_context * ctx                       = llama_init_from_model(model, params);
    CHECK(ctx);
    return ctx;
}

struct contexts {
    llama_context * const        stock = make_context();
    llama_context * const        split = make_context();
    std::unique_ptr<spac_engine> engine;
    llama_batch_ext *            batches[2];
    double                       full = 0; // divergence of all tokens
    int                          n = 0, n_same = 0;
    llama_pos                    pos    = 0; // of a text, many of which are computed
    uint32_t                     random = 1;
    llama_token                  last   = 11;

    contexts(const char * lossy, double max_kl) {
        spac_engine_params params = spac_engine_default_params();
        params.device             = "cpu";
        params.cache              = "25%";
        params.lossy              = lossy;
        engine                    = std::make_unique<spac_engine>(split, params, nullptr, nullptr, nullptr, max_kl);
        batches[0]                = llama_batch_ext_init(stock);
        batches[1]                = llama_batch_ext_init(split);
        begin_text();
    }

    ~contexts() {
        engine.reset();
        llama_batch_ext_free(batches[0]);
        llama_batch_ext_free(batches[1]);
        llama_free(stock);
        llama_free(split);
    }

    int32_t n_vocab() const { return llama_vocab_n_tokens(llama_model_get_vocab(model)); }

    // one that the distribution gives
    llama_token draw(const float * logits) {
        std::vector<double> p(n_vocab());
        double              sum = 0;
        for (int32_t i = 0; i < n_vocab(); i++) {
            sum += p[i] = std::exp(logits[i]);
        }
        random   = random * 1664525u + 1013904223u;
        double x = sum * (random / 4294967296.0);
        for (int32_t i = 0; i < n_vocab(); i++) {
            if ((x -= p[i]) <= 0) {
                return i;
            }
        }
        return n_vocab() - 1;
    }

    // a text begins with a prompt, which is exact as its batch is wide
    void begin_text() {
        static const char        text[] = "import os\n\n\ndef read_header(path):\n    \"\"\"Read the first lines of a file.\"\"\"\n    with open(path) as file:\n"
                                          "        lines = file.read().splitlines()\n    return [line for line in lines if line]\n\n\nclass Reader:\n";
        std::vector<llama_token> tokens(256);
        const int32_t            n_prompt = llama_tokenize(llama_model_get_vocab(model), text, sizeof(text) - 1, tokens.data(), 256, true, false);
        CHECK(n_prompt > 40);
        llama_context * const ctx[] = { stock, split };
        for (int c = 0; c < 2; c++) {
            CHECK(llama_memory_seq_rm(llama_get_memory(ctx[c]), 0, -1, -1));
            llama_batch_ext_clear(batches[c]);
            for (pos = 0; pos < n_prompt; pos++) {
                CHECK(llama_batch_ext_add_token(batches[c], 0, tokens[pos]) == pos);
                CHECK(llama_batch_ext_set_pos(batches[c], pos, &pos) && llama_batch_ext_set_output_logits(batches[c], pos, pos + 1 == n_prompt));
            }
            CHECK((c == 0 ? llama_process(stock, LLAMA_PROCESS_TYPE_DECODE, batches[c]) : engine->samples->process(batches[c])) == 0);
        }
        last = draw(llama_get_logits_ith(stock, n_prompt - 1));
    }

    // the same batch in both: `width` tokens of sequence 0, the first one drawn and the rest made up, as drafts may be; only the first stays
    void step(int32_t width) {
        llama_context * const ctx[] = { stock, split };
        for (int c = 0; c < 2; c++) {
            llama_batch_ext_clear(batches[c]);
            for (int32_t i = 0; i < width; i++) {
                const llama_pos at = pos + i;
                CHECK(llama_batch_ext_add_token(batches[c], 0, i == 0 ? last : 100 + i) == i);
                CHECK(llama_batch_ext_set_pos(batches[c], i, &at) && llama_batch_ext_set_output_logits(batches[c], i, true));
            }
            CHECK((c == 0 ? llama_process(stock, LLAMA_PROCESS_TYPE_DECODE, batches[c]) : engine->samples->process(batches[c])) == 0);
        }
        const float *exact = llama_get_logits_ith(stock, 0), *found = llama_get_logits_ith(split, 0);
        n_same += memcmp(exact, found, n_vocab() * sizeof(float)) == 0;
        full += spac_kl_divergence(exact, found, n_vocab());
        last = draw(found);
        n++;
        pos++;
        for (llama_context * one : ctx) {
            CHECK(llama_memory_seq_rm(llama_get_memory(one), 0, pos, -1));
        }
        if (pos >= 400) {
            begin_text();
        }
    }
};

static constexpr double NEAR = 0.4; // of 4000 tokens, whose 512 samples see 10 % too much or too little in the mean, and 20 % at most

static void test_divergence_is_as_estimated(const char * lossy, double max_kl, bool is_limited, int32_t width) {
    contexts c(lossy, max_kl);
    for (uint64_t i = 0; i < spac_kl_limit::N_FIRST / width; i++) {
        c.step(width);
    }
    CHECK(c.n_same == c.n); // of both ways the exact one stayed
    while (c.n < 4000) {
        c.step(width);
    }
    const spac_kl_limit & limit = c.engine->samples->limit;
    const double          mean = c.full / c.n, estimated = limit.spent / limit.n_tokens;
    printf("%s, limit %.4f, %d at a time: %.4f measured, %.4f estimated, of lossy ones %.4f (%d samples)\n", lossy, max_kl, width, mean, estimated,
           limit.sampled / limit.n_samples, (int) limit.n_samples);
    CHECK(std::fabs(estimated - mean) < NEAR * mean);
    CHECK(!is_limited || (std::fabs(mean - max_kl) < NEAR * max_kl && c.n_same < c.n));
    const spac_counters & counters = *c.engine->board->counters();
    CHECK(counters.n_kl_tokens == (uint64_t) c.n * width && counters.n_kl_samples == limit.n_samples);
    CHECK(std::fabs(counters.kl_total * 1e-6 - limit.spent) < 1e-5);
    CHECK(counters.router_weight_kept < counters.router_weight);
}

static void test_requests_that_want_all() {
    contexts c("drop:1", 100);
    c.engine->forward.begin_request(0, true);
    for (int i = 0; i < 100; i++) {
        c.step(1 + i % 5);
    }
    CHECK(c.n_same == 100 && c.engine->samples->limit.n_tokens == 0 && c.engine->board->counters()->n_left_out_rows == 0);
}

// what is computed twice is learned from once, and counted once
static void test_learned_once() {
    contexts           c("drop:1", 1e-6);
    const spac_board & board     = *c.engine->board;
    const auto         n_learned = [&] {
        c.engine->end_forward();
        return std::accumulate(c.engine->board->counts(), c.engine->board->counts() + (size_t) board.geometry().n_layer * board.geometry().n_expert, uint64_t{ 0 });
    };
    const uint64_t before = n_learned(); // of the prompt, whose last layer may be split
    for (int i = 0; i < 20; i++) {
        c.step(1);
    }
    CHECK(c.n_same == 20 && n_learned() - before == (uint64_t) 20 * board.geometry().n_layer * board.geometry().n_expert_used);
    CHECK(c.engine->board->counters()->router_weight_kept == c.engine->board->counters()->router_weight);
}

static void test_refusals() {
    llama_context *    ctx    = make_context();
    spac_engine_params params = spac_engine_default_params();
    params.device             = "cpu";
    params.cache              = "25%";
    bool is_refused           = false;
    try {
        spac_engine engine(ctx, params, nullptr, nullptr, nullptr, 0.1);
    } catch (const spac_error & e) {
        is_refused = strstr(e.what(), "give PYSPAC_LOSSY") != nullptr;
    }
    CHECK(is_refused);
    llama_free(ctx);
}

int main() {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    test_divergence();
    test_entropy();
    test_books();
    test_a_text_that_repeats_itself();
    test_what_is_cheap_is_always_lossy();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers       = 0;
    params.use_extra_bufts    = false; // the same kernels on both sides
    model                     = llama_model_load_from_file(SPAC_DEMO_MODEL, params);
    CHECK(model);
    test_divergence_is_as_estimated("drop:1", 100, false, 1);
    test_divergence_is_as_estimated("drop:1", 0.02, true, 1);
    test_divergence_is_as_estimated("substitute:0.1", 0.05, true, 1);
    test_requests_that_want_all();
    test_learned_once();
    test_refusals();
    llama_model_free(model);
    return 0;
}
