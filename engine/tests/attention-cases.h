// Attention's inputs, and what comes out in double precision.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

typedef std::vector<float> floats;

struct attention_case {
    std::string what;
    int64_t     n_k, n_v, n_heads, n_heads_kv, n_tokens, n_keys;
    bool        has_mask = true, has_sinks = false;
    int64_t     window = INT64_MAX; // keys that a token sees
    float       bias   = 0;         // of the visible ones
    float       slope = 0, cap = 0;
    ggml_type   type    = GGML_TYPE_F16;
    bool        is_ours = true;
    float       size    = 1; // of queries, and so of scores
};

inline floats random_floats(int64_t n, float size, uint32_t seed) {
    std::mt19937                    rng(seed);
    std::normal_distribution<float> normal(0, 1);
    floats                          values(n);
    for (float & v : values) {
        v = size * normal(rng);
    }
    return values;
}

// [n_keys, n_tokens]: the last token sees all keys but the last 3, which are empty cells; the first token nothing
inline floats mask_of(const attention_case & c) {
    floats mask = random_floats(c.n_keys * c.n_tokens, c.bias, 5);
    for (int64_t t = 0; t < c.n_tokens; t++) {
        const int64_t last = c.n_keys - 3 - c.n_tokens + t;
        for (int64_t k = 0; k < c.n_keys; k++) {
            const bool is_visible  = t > 0 && k <= last && k > last - c.window;
            mask[t * c.n_keys + k] = is_visible ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(mask[t * c.n_keys + k])) : -INFINITY;
        }
    }
    return mask;
}

struct inputs {
    floats q, k, v, mask, sinks;

    explicit inputs(const attention_case & c) :
        q(random_floats(c.n_k * c.n_tokens * c.n_heads, c.size, 1)), k(random_floats(c.n_k * c.n_keys * c.n_heads_kv, 1, 2)),
        v(random_floats(c.n_v * c.n_keys * c.n_heads_kv, 1, 3)), mask(mask_of(c)), sinks(random_floats(c.n_heads, 2, 4)) {
        for (floats * x : { &k, &v }) {
            for (float & f : *x) {
                f = c.type == GGML_TYPE_F16 ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(f)) : f;
            }
        }
    }
};

// of one token's head
inline std::vector<double> reference(const attention_case & c, const inputs & in, int64_t token, int64_t head) {
    const int64_t       head_kv = head / (c.n_heads / c.n_heads_kv);
    std::vector<double> scores(c.n_keys), out(c.n_v, 0.0);
    double              max = c.has_sinks ? in.sinks[head] : -INFINITY, sum = 0;
    for (int64_t key = 0; key < c.n_keys; key++) {
        for (int64_t i = 0; i < c.n_k; i++) {
            scores[key] += (double) in.q[(token * c.n_heads + head) * c.n_k + i] * in.k[(key * c.n_heads_kv + head_kv) * c.n_k + i];
        }
        scores[key] = scores[key] / sqrt((double) c.n_k) + (c.has_mask ? in.mask[token * c.n_keys + key] : 0);
        max         = std::max(max, scores[key]);
    }
    if (max == -INFINITY) {
        return out; // nothing is visible
    }
    sum = c.has_sinks ? exp(in.sinks[head] - max) : 0;
    for (int64_t key = 0; key < c.n_keys; key++) {
        const double p = exp(scores[key] - max);
        sum += p;
        for (int64_t i = 0; i < c.n_v; i++) {
            out[i] += p * in.v[(key * c.n_heads_kv + head_kv) * c.n_v + i];
        }
    }
    for (double & x : out) {
        x /= sum;
    }
    return out;
}

// [n_v, n_heads, n_tokens]
inline std::vector<double> references(const attention_case & c, const inputs & in) {
    std::vector<double> all;
    for (int64_t i = 0; i < c.n_tokens * c.n_heads; i++) {
        const std::vector<double> x = reference(c, in, i / c.n_heads, i % c.n_heads);
        all.insert(all.end(), x.begin(), x.end());
    }
    return all;
}

// keys and values before they became f16
inline inputs exact_inputs(attention_case c) {
    c.type = GGML_TYPE_F32;
    return inputs(c);
}

// norm of the difference to x, in double precision, relative to its norm
template <typename T>
double error_of(const std::vector<double> & x, const std::vector<T> & y) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < x.size(); i++) {
        difference += (y[i] - x[i]) * (y[i] - x[i]);
        norm += x[i] * x[i];
    }
    return sqrt(difference / norm);
}
