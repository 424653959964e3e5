// Which way wide batches go, by the time that they take: staged, or as llama.cpp does it.
#pragma once

#include <cstdint>

struct spac_prompt_way {
    int last_il = -1; // the time is taken up to this layer; -1: there is none

    bool is_staged = false; // the graph that was built last

    // for a new graph; is_forced: staged in any case; may_stage: else never
    void choose(bool is_forced, bool may_stage, int64_t n_tokens);

    void begin(int64_t n_tokens, uint64_t now); // of a forward
    void note_layer(int il, uint64_t now);      // it reached this layer

    // when choosing, of two ways whose times are known the faster is taken, but now and then the other is tried: once what
    // that costs is this share of the time since the last trial
    static constexpr double TRIAL_SHARE = 0.02;

  private:
    static constexpr int N_CLASSES = 16; // of widths, by powers of two: what pays at 2,048 tokens may not at 64

    struct figures {
        double us_per_token = 0; // 0: not known
        int    n            = 0;
    };
    struct width_class {
        figures of[2];        // llama.cpp's way; staged
        double  spent_us = 0; // since the last trial
    };

    static int class_of(int64_t n_tokens);

    width_class classes[N_CLASSES];
    uint64_t    begun_us = 0; // 0: no wide forward is under way
    int64_t     n_tokens = 0;
};
