// Attention of many tokens: the rows that share keys, what they see, and how they end. The query heads that share keys lie beside
// each other: a row is a token's query of one of them.
#pragma once

#include "kernels.h"

#include <math.h>
#include <string.h>

namespace {

struct attention_heads {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    int64_t            n_k, n_v, n_group, n_rows, head; // elements; query heads of one of the keys; rows of those; which keys
    float              scale;

    explicit attention_heads(const ggml_tensor * op, int64_t head) :
        q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), sinks(op->src[4]), n_k(k->ne[0]), n_v(v->ne[0]), n_group(q->ne[2] / k->ne[2]),
        n_rows(n_group * q->ne[1]), head(head) {
        memcpy(&scale, op->op_params, sizeof(scale));
    }

    int64_t token_of(int64_t row) const { return row / n_group; }
    int64_t head_of(int64_t row) const { return head * n_group + row % n_group; }

    // behind the last row: NULL
    const float * query_of(int64_t row) const {
        return row < n_rows ? (const float *) ((const char *) q->data + token_of(row) * q->nb[1] + head_of(row) * q->nb[2]) : nullptr;
    }

    float * out_of(const ggml_tensor * op, int64_t row) const {
        return (float *) ((char *) op->data + head_of(row) * op->nb[1] + token_of(row) * op->nb[2]);
    }

    // t: k or v
    const uint16_t * halves_of(const ggml_tensor * t, int64_t key) const { return (const uint16_t *) ((const char *) t->data + key * t->nb[1] + head * t->nb[2]); }

    const uint16_t * mask_of(int64_t token, int64_t key) const { return (const uint16_t *) ((const char *) mask->data + token * mask->nb[1]) + key; }
};

enum visible { NOTHING,
               SOMETHING,
               EVERYTHING };

// what the tokens of n_rows rows see of n keys: f16, 0 or -infinity but for other biases
visible what_is_visible(const attention_heads & a, int64_t first_row, int64_t n_rows, int64_t first_key, int64_t n) {
    if (!a.mask) {
        return EVERYTHING;
    }
    const int64_t last_row = first_row + n_rows < a.n_rows ? first_row + n_rows - 1 : a.n_rows - 1;
    bool          none = true, all = true;
    for (int64_t t = a.token_of(first_row); t <= a.token_of(last_row); t++) {
        const uint16_t * mask = a.mask_of(t, first_key);
        uint16_t         any = 0, differ = 0;
        for (int64_t i = 0; i < n; i++) {
            any |= mask[i];
            differ |= mask[i] ^ 0xFC00;
        }
        all &= any == 0;
        none &= differ == 0;
        if (!all && !none) {
            break;
        }
    }
    return none ? NOTHING : all ? EVERYTHING
                                : SOMETHING;
}

// a sink is a score without a value (gpt-oss)
float last_factor(const attention_heads & a, int64_t row, float max, float sum) {
    if (!a.sinks) {
        return sum > 0 ? 1 / sum : sum; // NaN stays
    }
    const float sink = ((const float *) a.sinks->data)[a.head_of(row)], most = max > sink ? max : sink;
    const float own = expf(max - most);
    return own / (sum * own + expf(sink - most));
}

} // namespace
