// Attention of many tokens, in f32, after an online softmax. Included by the files of instruction sets that have
//
//   vec, zero(), exp_ps(vec)                       a vector of floats
//   store_ps(), set_ps(float)                      aligned
//   add_mul(a, b, c)                               a + b * c
//   mul(), sub(), larger()
//   widen_halves(const uint16_t *)                 as many f16 as a vector has floats
//   LANE_VECS                                      vectors of a block
//
// A block has a row in each lane. So whatever is done to scores is done to whole vectors, keys and values are widened once for
// all rows of a call, and nothing is summed across lanes.
#pragma once

#include "attention-rows.h"

namespace {

static constexpr int LANES     = LANE_VECS * (int) (sizeof(vec) / sizeof(float));
static constexpr int TILE_KEYS = 64; // whose scores stay in the first cache
static constexpr int N_SUMS    = 6;  // rows of a product in registers
static constexpr int BLOCKS    = 8;  // for which keys and values are widened once

struct lanes {
    vec v[LANE_VECS];
};

// of one block of rows
struct attention_block {
    lanes *q, *out;  // [n_k], [n_v]
    lanes  max, sum; // of the scores so far, of their exponentials
};

// c[i] += a[i] * b for NT rows of n elements: c, b of lanes; a's elements in each
template <int NT>
SPAC_INLINE void add_product(const float * a, int64_t row_stride, int64_t stride, int64_t n, const lanes * b, lanes * c) {
    vec sums[NT][LANE_VECS]; // copied one by one: memcpy() would keep them in memory all the while
    for (int i = 0; i < NT; i++) {
        for (int v = 0; v < LANE_VECS; v++) {
            sums[i][v] = c[i].v[v];
        }
    }
    for (int64_t k = 0; k < n; k++, a += stride, b++) {
        for (int i = 0; i < NT; i++) {
            const vec x = set_ps(a[i * row_stride]);
            for (int v = 0; v < LANE_VECS; v++) {
                sums[i][v] = add_mul(sums[i][v], x, b->v[v]);
            }
        }
    }
    for (int i = 0; i < NT; i++) {
        for (int v = 0; v < LANE_VECS; v++) {
            c[i].v[v] = sums[i][v];
        }
    }
}

SPAC_INLINE void add_products(int64_t n_rows, const float * a, int64_t row_stride, int64_t stride, int64_t n, const lanes * b, lanes * c) {
    int64_t i = 0;
    for (; i + N_SUMS <= n_rows; i += N_SUMS) {
        add_product<N_SUMS>(a + i * row_stride, row_stride, stride, n, b, c + i);
    }
    for (; i < n_rows; i++) {
        add_product<1>(a + i * row_stride, row_stride, stride, n, b, c + i);
    }
}

// rows of f16
SPAC_INLINE void widen_keys(const attention_heads & a, const ggml_tensor * t, int64_t first, int64_t n, float * to) {
    for (int64_t i = 0; i < n; i++) {
        const uint16_t * row = a.halves_of(t, first + i);
        for (int64_t k = 0; k < t->ne[0]; k += sizeof(vec) / sizeof(float)) {
            store_ps(to + i * t->ne[0] + k, widen_halves(row + k));
        }
    }
}

// rows from `first` on, scaled; behind the last row are zeros
void take_queries(const attention_heads & a, int64_t first, attention_block & b) {
    memset((void *) b.out, 0, a.n_v * sizeof(lanes));
    for (int v = 0; v < LANE_VECS; v++) {
        b.max.v[v] = set_ps(-INFINITY);
        b.sum.v[v] = zero();
    }
    float * to = (float *) b.q;
    for (int lane = 0; lane < LANES; lane++) {
        const float * q = a.query_of(first + lane);
        for (int64_t i = 0; i < a.n_k; i++) {
            to[i * LANES + lane] = q ? q[i] * a.scale : 0;
        }
    }
}

void add_mask(const attention_heads & a, int64_t first_row, int64_t first_key, int64_t n, lanes * scores) {
    for (int lane = 0; lane < LANES && first_row + lane < a.n_rows; lane++) {
        const uint16_t * mask = a.mask_of(a.token_of(first_row + lane), first_key);
        for (int64_t i = 0; i < n; i++) {
            ((float *) &scores[i])[lane] += half_to_float(mask[i]);
        }
    }
}

// scores of n keys to their exponentials; scales what is summed so far
void add_softmax(attention_block & b, int64_t n_v, lanes * scores, int64_t n) {
    lanes factor;
    for (int v = 0; v < LANE_VECS; v++) {
        vec max = b.max.v[v];
        for (int64_t i = 0; i < n; i++) {
            max = larger(max, scores[i].v[v]);
        }
        const vec finite = larger(max, set_ps(-1e30f)); // where nothing was visible yet
        vec       sum    = zero();
        for (int64_t i = 0; i < n; i++) {
            scores[i].v[v] = exp_ps(sub(scores[i].v[v], finite));
            sum            = add_mul(sum, set_ps(1), scores[i].v[v]);
        }
        factor.v[v] = exp_ps(sub(b.max.v[v], finite));
        b.sum.v[v]  = add_mul(sum, factor.v[v], b.sum.v[v]);
        b.max.v[v]  = max;
    }
    for (int64_t i = 0; i < n_v; i++) {
        for (int v = 0; v < LANE_VECS; v++) {
            b.out[i].v[v] = mul(b.out[i].v[v], factor.v[v]);
        }
    }
}

void put_rows(const attention_heads & a, int64_t first, const attention_block & b, const ggml_tensor * op) {
    const float *out = (const float *) b.out, *max = (const float *) &b.max, *sum = (const float *) &b.sum;
    for (int lane = 0; lane < LANES && first + lane < a.n_rows; lane++) {
        const int64_t row    = first + lane;
        float *       to     = a.out_of(op, row);
        const float   factor = last_factor(a, row, max[lane], sum[lane]);
        for (int64_t i = 0; i < a.n_v; i++) {
            to[i] = out[i * LANES + lane] * factor;
        }
    }
}

size_t attention_bytes(int64_t n_k, int64_t n_v, int n_blocks) {
    return TILE_KEYS * (n_k + n_v) * sizeof(float) + (TILE_KEYS + n_blocks * (n_k + n_v)) * sizeof(lanes);
}

void attend(const ggml_tensor * op, int64_t head, int64_t first, int n_blocks, char * memory) {
    const attention_heads a(op, head);
    float *               keys   = (float *) memory;
    float *               values = keys + TILE_KEYS * a.n_k;
    lanes *               scores = (lanes *) (values + TILE_KEYS * a.n_v);
    lanes *               rest   = scores + TILE_KEYS;
    attention_block       blocks[BLOCKS];
    for (int ib = 0; ib < n_blocks; ib++, rest += a.n_k + a.n_v) {
        blocks[ib].q   = rest;
        blocks[ib].out = rest + a.n_k;
        take_queries(a, first + ib * LANES, blocks[ib]);
    }
    for (int64_t key = 0; key < a.k->ne[1]; key += TILE_KEYS) {
        const int64_t n          = a.k->ne[1] - key < TILE_KEYS ? a.k->ne[1] - key : TILE_KEYS;
        bool          is_widened = false;
        for (int ib = 0; ib < n_blocks; ib++) {
            const visible what = what_is_visible(a, first + ib * LANES, LANES, key, n);
            if (what == NOTHING) {
                continue;
            }
            if (!is_widened) {
                widen_keys(a, a.k, key, n, keys);
                widen_keys(a, a.v, key, n, values);
                is_widened = true;
            }
            memset((void *) scores, 0, n * sizeof(lanes));
            add_products(n, keys, a.n_k, 1, a.n_k, blocks[ib].q, scores);
            if (what == SOMETHING) {
                add_mask(a, first + ib * LANES, key, n, scores);
            }
            add_softmax(blocks[ib], a.n_v, scores, n);
            add_products(a.n_v, values, 1, a.n_v, n, scores, blocks[ib].out);
        }
    }
    for (int ib = 0; ib < n_blocks; ib++) {
        put_rows(a, first + ib * LANES, blocks[ib], op);
    }
}

const spac_attention attention = { LANES, BLOCKS, attention_bytes, attend };

} // namespace
