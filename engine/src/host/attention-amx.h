// Attention of many tokens in tiles of bf16 (AMX), after an online softmax.
//
// A bf16 has 8 bits of a number, so an f16 is the sum of two and an f32 of three, exactly; of the products of such parts only the
// last is left out, which lies behind what an f32 keeps. Rows are in the lanes of sums, as in attention-lanes.h; keys, and then
// elements of values, in their lines. So scores become the right factor of the second product as they lie, a pair of keys in a word.
// While a tile is multiplied the processor has time for vectors: one half of a block multiplies beside the other's softmax.
#pragma once

#include "attention-rows.h"
#include "exp-512.h"
#include "formats-512.h"
#include "tiles.h"

namespace {

static constexpr int TILE_KEYS  = 128;           // of one step of the softmax
static constexpr int BOTH_SIDES = 2 * TILE_SIDE; // sums are made in 2 x 2 tiles
static constexpr int BLOCK_ROWS = 2 * BOTH_SIDES;

static_assert(TILE_KEYS % BOTH_SIDES == 0 && BOTH_SIDES == TILE_COLS, "padding");

// the parts of 16 x 32 numbers, the largest first
struct left_tiles {
    pair_tile part[2];
};

struct right_tiles {
    pair_tile part[3];
};

SPAC_INLINE int64_t padded(int64_t n) {
    return (n + TILE_COLS - 1) / TILE_COLS * TILE_COLS;
}

// 16 pairs of numbers
struct pairs {
    __m512 x, y;

    static SPAC_INLINE __m512 rest_of(__m512 x) {
        return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int) 0xffff0000))));
    }

    // their largest parts; leaves the rest
    SPAC_INLINE __m512i take_part() {
        const __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(_mm512_castps_si512(x), 16), _mm512_castps_si512(y));
        x                  = rest_of(x);
        y                  = rest_of(y);
        return both;
    }

    template <typename T>
    SPAC_INLINE void put(T & to, int64_t line) {
        for (pair_tile & part : to.part) {
            _mm512_store_si512(part.pairs[line], take_part());
        }
    }
};

template <typename T>
SPAC_INLINE void turn_parts(const T & from, T & to) {
    for (size_t i = 0; i < sizeof(from.part) / sizeof(pair_tile); i++) {
        turn_rows(&from.part[i], (__m512i *) &to.part[i]);
    }
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
void take_keys(const attention_heads & a, int64_t first, int64_t n, left_tiles * to) {
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
void take_values(const attention_heads & a, int64_t first, int64_t n, left_tiles * to) {
    for (int64_t key = 0; key < n; key += TILE_COLS) {
        for (int64_t i = 0; i < padded(a.n_v); i += TILE_SIDE) {
            left_tiles lines;
            for (int64_t pair = 0; pair < TILE_SIDE; pair++) {
                const int64_t k = key + 2 * pair;
                pairs         x = { halves_at(k < n ? a.halves_of(a.v, first + k) : nullptr, i, a.n_v),
                                    halves_at(k + 1 < n ? a.halves_of(a.v, first + k + 1) : nullptr, i, a.n_v) };
                x.put(lines, pair);
            }
            turn_parts(lines, to[i / TILE_SIDE * (TILE_KEYS / TILE_COLS) + key / TILE_COLS]);
        }
    }
}

// 16 rows as columns, scaled
void take_queries(const attention_heads & a, int64_t first, right_tiles * to) {
    for (int64_t i = 0; i < padded(a.n_k); i += TILE_COLS, to++) {
        right_tiles lines;
        for (int64_t row = 0; row < TILE_SIDE; row++) {
            const float * q = a.query_of(first + row);
            pairs         x = { floats_at(q, i, a.n_k, a.scale), floats_at(q, i + 16, a.n_k, a.scale) };
            x.put(lines, row);
        }
        turn_parts(lines, *to);
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
SPAC_INLINE void load_left(const left_tiles & first, const left_tiles & second, int part) {
    Tiles::template load<4>(&first.part[part]);
    Tiles::template load<5>(&second.part[part]);
}

template <typename Tiles>
SPAC_INLINE void load_right(const right_tiles & first, const right_tiles & second, int part) {
    Tiles::template load<6>(&first.part[part]);
    Tiles::template load<7>(&second.part[part]);
}

// sums of 32 lines of 32 lanes, in two times 16
template <typename Tiles, typename Work>
SPAC_INLINE void multiply_2x2(const left_tiles * a, int64_t a_stride, const right_tiles * b, int64_t b_stride, int64_t n_steps, Work & work) {
    for (int64_t i = 0; i < n_steps; i++, a++, b++) {
        load_left<Tiles>(a[0], a[a_stride], 0);
        load_right<Tiles>(b[0], b[b_stride], 2);
        add_products<Tiles>(work);
        load_right<Tiles>(b[0], b[b_stride], 0);
        add_products<Tiles>(work);
        load_right<Tiles>(b[0], b[b_stride], 1);
        add_products<Tiles>(work);
        load_left<Tiles>(a[0], a[a_stride], 1);
        add_products<Tiles>(work);
        load_right<Tiles>(b[0], b[b_stride], 0);
        add_products<Tiles>(work);
    }
}

static constexpr int N_RUNS = 5; // of the work, in a step

// c = a . b or c += a . b: n lines of two times 16 lanes, c_stride apart
template <typename Tiles, bool IS_NEW, typename Work>
void multiply(const left_tiles * a, int64_t n, int64_t a_stride, const right_tiles * b, int64_t b_stride, int64_t n_steps, __m512 * c, int64_t c_stride, Work && work) {
    for (int64_t line = 0; line < n; line += BOTH_SIDES, a += 2 * a_stride, c += BOTH_SIDES) {
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
    right_tiles *  to;
    int64_t        n_pairs, next = 0;
    __m512         max, sum;

    softmax(row_sums & sums, int64_t n_v, __m512 * scores, int64_t n, right_tiles * to) :
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

        const __m512 factor = exp_ps(_mm512_sub_ps(sums.max, max));
        sums.max            = all;
        sums.sum            = _mm512_mul_ps(sums.sum, factor);
        for (int64_t i = 0; i < n_v; i++) {
            sums.out[i] = _mm512_mul_ps(sums.out[i], factor);
        }
    }

    SPAC_INLINE void add_pair() {
        pairs p = { exp_ps(_mm512_sub_ps(scores[2 * next], max)), exp_ps(_mm512_sub_ps(scores[2 * next + 1], max)) };
        sum     = _mm512_add_ps(_mm512_add_ps(sum, p.x), p.y);
        p.put(to[next / TILE_SIDE], next % TILE_SIDE);
        next++;
    }
};

// of two times 16 rows, a piece at each run
struct two_softmaxes {
    softmax first, second;
    int64_t n_at_once;

    two_softmaxes(row_sums * sums, int64_t n_v, __m512 * scores, int64_t n, right_tiles * to, int64_t n_runs) :
        first(sums[0], n_v, scores, n, to), second(sums[1], n_v, scores + TILE_KEYS, n, to + TILE_KEYS / TILE_COLS),
        n_at_once((first.n_pairs + n_runs - 1) / n_runs) {}

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
            scores[key + i] = _mm512_add_ps(scores[key + i], _mm512_castsi512_ps(columns[i]));
        }
    }
}

void put_rows(const attention_heads & a, int64_t first, const row_sums & s, const ggml_tensor * op) {
    const float *max = (const float *) &s.max, *sum = (const float *) &s.sum;
    for (int64_t i = 0; i < a.n_v; i += TILE_SIDE) {
        __m512i columns[TILE_SIDE];
        turn_rows(s.out + i, columns);
        for (int64_t r = 0; r < TILE_SIDE && first + r < a.n_rows; r++) {
            const __m512 factor = _mm512_set1_ps(last_factor(a, first + r, max[r], sum[r]));
            _mm512_storeu_ps(a.out_of(op, first + r) + i, _mm512_mul_ps(_mm512_castsi512_ps(columns[r]), factor));
        }
    }
}

// ---- blocks of rows

struct attention_memory {
    int64_t      n_k, n_v; // padded
    left_tiles * keys;     // [TILE_KEYS / 16][n_k / 32]
    left_tiles * values;   // [n_v / 16][TILE_KEYS / 32]
    right_tiles *exps, *q; // [2][2][TILE_KEYS / 32]; of each block [4][n_k / 32]
    __m512 *     scores;   // [4][TILE_KEYS]
    __m512 *     out;      // of each block [4][n_v]
    char *       end;

    attention_memory(char * memory, int64_t n_k, int64_t n_v, int n_blocks) :
        n_k(padded(n_k)), n_v(padded(n_v)) {
        keys   = (left_tiles *) memory;
        values = keys + TILE_KEYS / TILE_SIDE * this->n_k / TILE_COLS;
        exps   = (right_tiles *) (values + this->n_v / TILE_SIDE * TILE_KEYS / TILE_COLS);
        q      = exps + BLOCK_ROWS / TILE_SIDE * TILE_KEYS / TILE_COLS;
        scores = (__m512 *) (q + n_blocks * (BLOCK_ROWS / TILE_SIDE) * this->n_k / TILE_COLS);
        out    = scores + BLOCK_ROWS / TILE_SIDE * TILE_KEYS;
        end    = (char *) (out + n_blocks * (BLOCK_ROWS / TILE_SIDE) * this->n_v);
    }
};

size_t tile_attention_bytes(int64_t n_k, int64_t n_v, int n_blocks) {
    alignas(64) char nothing[64];
    return attention_memory(nothing, n_k, n_v, n_blocks).end - nothing;
}

struct row_block {
    int64_t             first;
    const right_tiles * q;
    row_sums            sums[BLOCK_ROWS / TILE_SIDE];
};

// n keys from `key` on, which are taken
template <typename Tiles>
void attend_keys(const attention_heads & a, const attention_memory & m, int64_t key, int64_t n, row_block & b) {
    const int64_t n_k = m.n_k / TILE_COLS, n_p = TILE_KEYS / TILE_COLS, n_exps = padded(n) / TILE_COLS;
    const bool    has_mask = what_is_visible(a, b.first, BLOCK_ROWS, key, n) != EVERYTHING;

    const auto add_masks = [&](int half) {
        for (int i = 2 * half; has_mask && i < 2 * half + 2; i++) {
            add_mask(a, b.first + i * TILE_SIDE, key, n, m.scores + i * TILE_KEYS);
        }
    };
    multiply<Tiles, true>(m.keys, padded(n), n_k, b.q, n_k, n_k, m.scores, TILE_KEYS, no_work());
    add_masks(0);
    two_softmaxes first(b.sums, m.n_v, m.scores, n, m.exps, n_exps * n_k * N_RUNS);
    multiply<Tiles, true>(m.keys, padded(n), n_k, b.q + 2 * n_k, n_k, n_k, m.scores + 2 * TILE_KEYS, TILE_KEYS, first);
    first.end();
    add_masks(1);
    two_softmaxes second(b.sums + 2, m.n_v, m.scores + 2 * TILE_KEYS, n, m.exps + 2 * n_p, m.n_v / BOTH_SIDES * n_exps * N_RUNS);
    multiply<Tiles, false>(m.values, m.n_v, n_p, m.exps, n_p, n_exps, b.sums[0].out, m.n_v, second);
    second.end();
    multiply<Tiles, false>(m.values, m.n_v, n_p, m.exps + 2 * n_p, n_p, n_exps, b.sums[2].out, m.n_v, no_work());
}

// how many of n keys: behind them the block's tokens see nothing
int64_t n_visible(const attention_heads & a, int64_t first_row, int64_t key, int64_t n) {
    while (n > 0) {
        const int64_t begin = padded(n) - TILE_COLS;
        if (what_is_visible(a, first_row, BLOCK_ROWS, key + begin, n - begin) != NOTHING) {
            break;
        }
        n = begin;
    }
    return n;
}

template <typename Tiles>
void attend_tiles(const ggml_tensor * op, int64_t head, int64_t first, int n_blocks, char * memory) {
    const attention_heads  a(op, head);
    const attention_memory m(memory, a.n_k, a.n_v, n_blocks);
    constexpr int          N_SUMS = BLOCK_ROWS / TILE_SIDE;
    row_block              blocks[SPAC_ATTENTION_BLOCKS];
    for (int ib = 0; ib < n_blocks; ib++) {
        right_tiles * q  = m.q + ib * N_SUMS * m.n_k / TILE_COLS;
        blocks[ib].first = first + ib * BLOCK_ROWS;
        blocks[ib].q     = q;
        for (int i = 0; i < N_SUMS; i++) {
            take_queries(a, blocks[ib].first + i * TILE_SIDE, q + i * m.n_k / TILE_COLS);
            blocks[ib].sums[i].begin(m.out + (ib * N_SUMS + i) * m.n_v, m.n_v);
        }
    }
    Tiles::configure();
    for (int64_t key = 0; key < a.k->ne[1]; key += TILE_KEYS) {
        const int64_t n        = a.k->ne[1] - key < TILE_KEYS ? a.k->ne[1] - key : TILE_KEYS;
        bool          is_taken = false;
        for (int ib = 0; ib < n_blocks; ib++) {
            const int64_t n_seen = n_visible(a, blocks[ib].first, key, n);
            if (n_seen > 0 && !is_taken) {
                take_keys(a, key, n, m.keys);
                take_values(a, key, n, m.values);
                is_taken = true;
            }
            if (n_seen > 0) {
                attend_keys<Tiles>(a, m, key, n_seen, blocks[ib]);
            }
        }
    }
    Tiles::release();
    for (int ib = 0; ib < n_blocks; ib++) {
        for (int i = 0; i < N_SUMS; i++) {
            put_rows(a, blocks[ib].first + i * TILE_SIDE, blocks[ib].sums[i], op);
        }
    }
}

template <typename Tiles>
const spac_attention * tile_attention() {
    static const spac_attention attention = { BLOCK_ROWS, tile_attention_bytes, attend_tiles<Tiles> };
    return &attention;
}

} // namespace
