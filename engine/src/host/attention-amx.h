// Attention of many tokens in tiles of bf16 (AMX), after an online softmax.
//
// A number is the sum of two bf16, to 2^-17 of it (an f16 exactly). The product of the two small ones is left out: what is lost is a
// fiftieth of what keys and values lost when they became f16.
// Rows are in the lanes of sums, as in attention-lanes.h; keys, and then elements of values, in their lines. So scores become the
// right factor of the second product as they lie, a pair of keys in a word.
// While a tile is multiplied the processor has time for vectors: a block's softmax is made beside the products of those around it.
#pragma once

#include "attention-rows.h"
#include "exp-512.h"
#include "formats-512.h"
#include "tiles.h"

namespace {

// measured: of 128 keys, sums go to memory and back twice as often, and take 3 to 14 % longer
static constexpr int TILE_KEYS  = 256;           // of one step of the softmax
static constexpr int BLOCK_ROWS = 2 * TILE_SIDE; // sums are made in 2 x 2 tiles
static constexpr int BLOCKS     = 16;            // for which keys and values are taken once: half a MiB with heads of 128

static constexpr float LOG2_E = 1.44269504f; // scores are taken times it, so that 2^x is e^x

static_assert(TILE_KEYS % BLOCK_ROWS == 0 && BLOCK_ROWS == TILE_COLS, "padding");

// 16 x 32 numbers, each the sum of two
struct split_tile {
    pair_tile large, small;
};

SPAC_INLINE int64_t padded(int64_t n) {
    return (n + TILE_COLS - 1) / TILE_COLS * TILE_COLS;
}

// 16 pairs of numbers
struct pairs {
    __m512 x, y;

    // the nearest bf16, a pair in a word
    SPAC_INLINE __m512i as_bf16() const {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(order, (__m512i) _mm512_cvtne2ps_pbh(y, x));
    }

    SPAC_INLINE void put(split_tile & to, int64_t line) const {
        const __m512i large   = as_bf16();
        const __m512  x_large = _mm512_castsi512_ps(_mm512_slli_epi32(large, 16));
        const __m512  y_large = _mm512_castsi512_ps(_mm512_and_si512(large, _mm512_set1_epi32((int) 0xffff0000)));
        const pairs   rest    = { _mm512_sub_ps(x, x_large), _mm512_sub_ps(y, y_large) };
        _mm512_store_si512(to.large.pairs[line], large);
        _mm512_store_si512(to.small.pairs[line], rest.as_bf16());
    }
};

SPAC_INLINE void turn(const split_tile & from, split_tile & to) {
    turn_rows(&from.large, (__m512i *) &to.large);
    turn_rows(&from.small, (__m512i *) &to.small);
}

// ---- what is multiplied

// 16 halves of a row of n from i on; behind it, and without a row, 0
SPAC_INLINE __m512 halves_at(const uint16_t * row, int64_t i, int64_t n) {
    return row && i < n ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (row + i))) : _mm512_setzero_ps();
}

SPAC_INLINE __m512 floats_at(const float * row, int64_t i, int64_t n, float scale) {
    return row && i < n ? _mm512_mul_ps(_mm512_loadu_ps(row + i), _mm512_set1_ps(scale)) : _mm512_setzero_ps();
}

// n keys as lines; of 32 elements the first is beside the 17th
void take_keys(const attention_heads & a, int64_t first, int64_t n, split_tile * to) {
    const int64_t n_steps = padded(a.n_k) / TILE_COLS;
    for (int64_t key = 0; key < padded(n); key++) {
        const uint16_t * row = key < n ? a.halves_of(a.k, first + key) : nullptr;
        for (int64_t i = 0; i < padded(a.n_k); i += TILE_COLS) {
            pairs x = { halves_at(row, i, a.n_k), halves_at(row, i + 16, a.n_k) };
            x.put(to[key / TILE_SIDE * n_steps + i / TILE_COLS], key % TILE_SIDE);
        }
    }
}

// n values as columns: an element of all of them is a line
void take_values(const attention_heads & a, int64_t first, int64_t n, split_tile * to) {
    for (int64_t key = 0; key < n; key += TILE_COLS) {
        for (int64_t i = 0; i < padded(a.n_v); i += TILE_SIDE) {
            split_tile lines;
            for (int64_t pair = 0; pair < TILE_SIDE; pair++) {
                const int64_t k = key + 2 * pair;
                pairs         x = { halves_at(k < n ? a.halves_of(a.v, first + k) : nullptr, i, a.n_v),
                                    halves_at(k + 1 < n ? a.halves_of(a.v, first + k + 1) : nullptr, i, a.n_v) };
                x.put(lines, pair);
            }
            turn(lines, to[i / TILE_SIDE * (TILE_KEYS / TILE_COLS) + key / TILE_COLS]);
        }
    }
}

// 16 rows as columns, scaled
void take_queries(const attention_heads & a, int64_t first, split_tile * to) {
    const float scale = a.scale * LOG2_E;
    for (int64_t i = 0; i < padded(a.n_k); i += TILE_COLS, to++) {
        split_tile lines;
        for (int64_t row = 0; row < TILE_SIDE; row++) {
            const float * q = a.query_of(first + row);
            pairs         x = { floats_at(q, i, a.n_k, scale), floats_at(q, i + 16, a.n_k, scale) };
            x.put(lines, row);
        }
        turn(lines, *to);
    }
}

// ---- products

struct no_work {
    SPAC_INLINE void run() {}
};

template <typename Tiles, typename Work>
SPAC_INLINE void add_products(Work & work) {
    Tiles::template dot<0, 4, 6>();
    Tiles::template dot<1, 5, 6>();
    Tiles::template dot<2, 4, 7>();
    Tiles::template dot<3, 5, 7>();
    work.run();
}

template <typename Tiles>
SPAC_INLINE void load_left(const pair_tile & first, const pair_tile & second) {
    Tiles::template load<4>(&first);
    Tiles::template load<5>(&second);
}

template <typename Tiles>
SPAC_INLINE void load_right(const pair_tile & first, const pair_tile & second) {
    Tiles::template load<6>(&first);
    Tiles::template load<7>(&second);
}

// sums of 32 lines of 32 lanes, in two times 16
template <typename Tiles, typename Work>
SPAC_INLINE void multiply_2x2(const split_tile * a, int64_t a_stride, const split_tile * b, int64_t b_stride, int64_t n_steps, Work & work) {
    for (int64_t i = 0; i < n_steps; i++, a++, b++) {
        load_left<Tiles>(a[0].large, a[a_stride].large);
        load_right<Tiles>(b[0].small, b[b_stride].small);
        add_products<Tiles>(work);
        load_right<Tiles>(b[0].large, b[b_stride].large);
        add_products<Tiles>(work);
        load_left<Tiles>(a[0].small, a[a_stride].small);
        add_products<Tiles>(work);
    }
}

// how often multiply() runs the work beside it
SPAC_INLINE int64_t n_runs(int64_t n_lines, int64_t n_steps) {
    return n_lines / BLOCK_ROWS * n_steps * 3;
}

// c = a . b or c += a . b: n lines of two times 16 lanes, c_stride apart
template <typename Tiles, bool IS_NEW, typename Work>
void multiply(const split_tile * a, int64_t n, int64_t a_stride, const split_tile * b, int64_t b_stride, int64_t n_steps, __m512 * c, int64_t c_stride, Work && work) {
    for (int64_t line = 0; line < n; line += BLOCK_ROWS, a += 2 * a_stride, c += BLOCK_ROWS) {
        if (IS_NEW) {
            Tiles::template zero<0>();
            Tiles::template zero<1>();
            Tiles::template zero<2>();
            Tiles::template zero<3>();
        } else {
            Tiles::template load<0>(c);
            Tiles::template load<1>(c + TILE_SIDE);
            Tiles::template load<2>(c + c_stride);
            Tiles::template load<3>(c + c_stride + TILE_SIDE);
        }
        multiply_2x2<Tiles>(a, a_stride, b, b_stride, n_steps, work);
        Tiles::template store<0>(c);
        Tiles::template store<1>(c + TILE_SIDE);
        Tiles::template store<2>(c + c_stride);
        Tiles::template store<3>(c + c_stride + TILE_SIDE);
    }
}

// ---- softmax

// of 16 rows, so far
struct row_sums {
    __m512 * out;      // [n_v]
    __m512   max, sum; // of the scores, of their exponentials

    void begin(__m512 * memory, int64_t n_v) {
        out = memory;
        max = _mm512_set1_ps(-INFINITY);
        sum = _mm512_setzero_ps();
        memset((void *) out, 0, n_v * sizeof(*out));
    }
};

// n scores of 16 rows to their exponentials, in pairs of keys; scales what is summed so far
struct softmax {
    row_sums &     sums;
    const __m512 * scores;
    split_tile *   to;
    int64_t        n_pairs, next = 0;
    __m512         max, sum;

    softmax(row_sums & sums, int64_t n_v, __m512 * scores, int64_t n, split_tile * to) :
        sums(sums), scores(scores), to(to), n_pairs(padded(n) / 2), sum(_mm512_setzero_ps()) {
        for (int64_t i = n; i < 2 * n_pairs; i++) {
            scores[i] = _mm512_set1_ps(-INFINITY);
        }
        __m512 most[4] = { sums.max, sums.max, sums.max, sums.max };
        for (int64_t i = 0; i < 2 * n_pairs; i += 4) {
            for (int j = 0; j < 4; j++) {
                most[j] = _mm512_max_ps(most[j], scores[i + j]);
            }
        }
        const __m512 all = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        max              = _mm512_max_ps(all, _mm512_set1_ps(-1e30f)); // finite, where nothing was visible yet

        const __m512 factor      = exp2_ps(_mm512_sub_ps(sums.max, max));
        const bool   has_new_max = _mm512_cmp_ps_mask(factor, _mm512_set1_ps(1), _CMP_NEQ_UQ);
        sums.max                 = all;
        sums.sum                 = _mm512_mul_ps(sums.sum, factor);
        for (int64_t i = 0; has_new_max && i < n_v; i++) {
            sums.out[i] = _mm512_mul_ps(sums.out[i], factor);
        }
    }

    SPAC_INLINE void add_pair() {
        pairs p = { exp2_ps(_mm512_sub_ps(scores[2 * next], max)), exp2_ps(_mm512_sub_ps(scores[2 * next + 1], max)) };
        sum     = _mm512_add_ps(_mm512_add_ps(sum, p.x), p.y);
        p.put(to[next / TILE_SIDE], next % TILE_SIDE);
        next++;
    }
};

// of two times 16 rows, a piece at each run
struct two_softmaxes {
    softmax first, second;
    int64_t n_at_once;

    two_softmaxes(row_sums * sums, int64_t n_v, __m512 * scores, int64_t n, split_tile * to, int64_t n_beside) :
        first(sums[0], n_v, scores, n, to), second(sums[1], n_v, scores + TILE_KEYS, n, to + TILE_KEYS / TILE_COLS),
        n_at_once(n_beside ? (first.n_pairs + n_beside - 1) / n_beside : first.n_pairs) {}

    SPAC_INLINE void run() {
        for (int64_t i = 0; i < n_at_once && first.next < first.n_pairs; i++) {
            first.add_pair();
            second.add_pair();
        }
    }

    void end() {
        while (first.next < first.n_pairs) {
            run();
        }
        first.sums.sum  = _mm512_add_ps(first.sums.sum, first.sum);
        second.sums.sum = _mm512_add_ps(second.sums.sum, second.sum);
    }
};

// of 16 rows
void add_mask(const attention_heads & a, int64_t first_row, int64_t first_key, int64_t n, __m512 * scores) {
    for (int64_t key = 0; key < n; key += TILE_SIDE) {
        const __mmask16 is_there = n - key < TILE_SIDE ? (__mmask16) ((1u << (n - key)) - 1) : 0xFFFF;
        pair_tile       lines;
        for (int64_t row = 0; row < TILE_SIDE; row++) {
            const int64_t last = a.n_rows - 1, r = first_row + row < last ? first_row + row : last; // behind the last: as the last
            _mm512_store_ps(lines.pairs[row], _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(is_there, a.mask_of(a.token_of(r), first_key + key))));
        }
        __m512i columns[TILE_SIDE];
        turn_rows(&lines, columns);
        for (int64_t i = 0; i < TILE_SIDE; i++) {
            scores[key + i] = _mm512_fmadd_ps(_mm512_castsi512_ps(columns[i]), _mm512_set1_ps(LOG2_E), scores[key + i]);
        }
    }
}

void put_rows(const attention_heads & a, int64_t first, const row_sums & s, const ggml_tensor * op) {
    const float *max = (const float *) &s.max, *sum = (const float *) &s.sum;
    for (int64_t i = 0; i < a.n_v; i += TILE_SIDE) {
        __m512i columns[TILE_SIDE];
        turn_rows(s.out + i, columns);
        for (int64_t r = 0; r < TILE_SIDE && first + r < a.n_rows; r++) {
            const __m512 factor = _mm512_set1_ps(last_factor(a, first + r, max[r] / LOG2_E, sum[r]));
            _mm512_storeu_ps(a.out_of(op, first + r) + i, _mm512_mul_ps(_mm512_castsi512_ps(columns[r]), factor));
        }
    }
}

// ---- blocks of rows

struct attention_memory {
    int64_t      n_k, n_v; // padded
    split_tile * keys;     // [TILE_KEYS / 16][n_k / 32]
    split_tile * values;   // [n_v / 16][TILE_KEYS / 32]
    split_tile * exps;     // of two blocks [2][TILE_KEYS / 32]
    split_tile * q;        // of each block [2][n_k / 32]
    __m512 *     scores;   // of two blocks [2][TILE_KEYS]
    __m512 *     out;      // of each block [2][n_v]
    char *       end;

    attention_memory(char * memory, int64_t n_k, int64_t n_v, int n_blocks) :
        n_k(padded(n_k)), n_v(padded(n_v)) {
        keys   = (split_tile *) memory;
        values = keys + TILE_KEYS / TILE_SIDE * this->n_k / TILE_COLS;
        exps   = values + this->n_v / TILE_SIDE * TILE_KEYS / TILE_COLS;
        q      = exps + 2 * 2 * TILE_KEYS / TILE_COLS;
        scores = (__m512 *) (q + n_blocks * 2 * this->n_k / TILE_COLS);
        out    = scores + 2 * 2 * TILE_KEYS;
        end    = (char *) (out + n_blocks * 2 * this->n_v);
    }
};

size_t tile_attention_bytes(int64_t n_k, int64_t n_v, int n_blocks) {
    alignas(64) char nothing[64];
    return attention_memory(nothing, n_k, n_v, n_blocks).end - nothing;
}

struct row_block {
    int64_t      first;
    split_tile * q;
    row_sums     sums[2];
    int64_t      first_key, n_keys; // that it sees, of those taken; the first is a multiple of 32
    bool         has_mask;

    void begin(const attention_heads & a, const attention_memory & m, int64_t first_row, int i) {
        first = first_row + i * BLOCK_ROWS;
        q     = m.q + i * 2 * m.n_k / TILE_COLS;
        for (int half = 0; half < 2; half++) {
            take_queries(a, first + half * TILE_SIDE, q + half * m.n_k / TILE_COLS);
            sums[half].begin(m.out + (2 * i + half) * m.n_v, m.n_v);
        }
    }

    // at n keys from `key` on: before and behind those found its tokens see nothing
    void look(const attention_heads & a, int64_t key, int64_t n) {
        const auto visible_at = [&](int64_t from, int64_t to) { return what_is_visible(a, first, BLOCK_ROWS, key + from, to - from); };

        const visible all = visible_at(0, n);
        int64_t       end = all == NOTHING ? 0 : n;
        has_mask          = all == SOMETHING;
        first_key         = 0;
        while (has_mask && visible_at(padded(end) - TILE_COLS, end) == NOTHING) {
            end = padded(end) - TILE_COLS;
        }
        while (has_mask && first_key + TILE_COLS < end && visible_at(first_key, first_key + TILE_COLS) == NOTHING) {
            first_key += TILE_COLS;
        }
        n_keys = end - first_key;
    }
};

// Keys from `key` on, which are taken, with the blocks that see some.
template <typename Tiles>
struct block_pipeline {
    const attention_heads &  a;
    const attention_memory & m;
    row_block *              blocks[BLOCKS] = {};
    int                      n_blocks       = 0;

    __m512 *     scores_of(int i) const { return m.scores + i % 2 * 2 * TILE_KEYS; }
    split_tile * exps_of(int i) const { return m.exps + i % 2 * 2 * TILE_KEYS / TILE_COLS; }

    template <typename Work>
    void score(int i, Work && work) const {
        const int64_t n_steps = m.n_k / TILE_COLS;
        multiply<Tiles, true>(m.keys + blocks[i]->first_key / TILE_SIDE * n_steps, padded(blocks[i]->n_keys), n_steps, blocks[i]->q, n_steps, n_steps, scores_of(i), TILE_KEYS, work);
    }

    template <typename Work>
    void add_values(int i, Work && work) const {
        const int64_t stride = TILE_KEYS / TILE_COLS;
        multiply<Tiles, false>(m.values + blocks[i]->first_key / TILE_COLS, m.n_v, stride, exps_of(i), stride, padded(blocks[i]->n_keys) / TILE_COLS, blocks[i]->sums[0].out, m.n_v, work);
    }

    int64_t n_runs_beside(int i) const {
        const int64_t n_next = i + 1 < n_blocks ? padded(blocks[i + 1]->n_keys) : 0, n_before = i > 0 ? padded(blocks[i - 1]->n_keys) : 0;
        return n_runs(n_next, m.n_k / TILE_COLS) + n_runs(m.n_v, n_before / TILE_COLS);
    }

    void run(int64_t key) const {
        score(0, no_work());
        for (int i = 0; i < n_blocks; i++) {
            row_block & b = *blocks[i];
            for (int half = 0; b.has_mask && half < 2; half++) {
                add_mask(a, b.first + half * TILE_SIDE, key + b.first_key, b.n_keys, scores_of(i) + half * TILE_KEYS);
            }
            two_softmaxes softmax(b.sums, m.n_v, scores_of(i), b.n_keys, exps_of(i), n_runs_beside(i));
            if (i + 1 < n_blocks) {
                score(i + 1, softmax);
            }
            if (i > 0) {
                add_values(i - 1, softmax);
            }
            softmax.end();
        }
        add_values(n_blocks - 1, no_work());
    }
};

template <typename Tiles>
void attend_tiles(const ggml_tensor * op, int64_t head, int64_t first, int n_blocks, char * memory) {
    const attention_heads  a(op, head);
    const attention_memory m(memory, a.n_k, a.n_v, n_blocks);
    row_block              blocks[BLOCKS];
    for (int i = 0; i < n_blocks; i++) {
        blocks[i].begin(a, m, first, i);
    }
    Tiles::configure();
    for (int64_t key = 0; key < a.k->ne[1]; key += TILE_KEYS) {
        const int64_t         n = a.k->ne[1] - key < TILE_KEYS ? a.k->ne[1] - key : TILE_KEYS;
        block_pipeline<Tiles> pipeline{ a, m };
        for (int i = 0; i < n_blocks; i++) {
            blocks[i].look(a, key, n);
            if (blocks[i].n_keys > 0) {
                pipeline.blocks[pipeline.n_blocks++] = &blocks[i];
            }
        }
        if (pipeline.n_blocks > 0) {
            take_keys(a, key, n, m.keys);
            take_values(a, key, n, m.values);
            pipeline.run(key);
        }
    }
    Tiles::release();
    for (int i = 0; i < n_blocks; i++) {
        for (int half = 0; half < 2; half++) {
            put_rows(a, blocks[i].first + half * TILE_SIDE, blocks[i].sums[half], op);
        }
    }
}

template <typename Tiles>
const spac_attention * tile_attention() {
    static const spac_attention attention = { BLOCK_ROWS, BLOCKS, tile_attention_bytes, attend_tiles<Tiles> };
    return &attention;
}

} // namespace
