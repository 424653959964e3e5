// Panels of bf16 for tiles of 16 x 16 sums (AMX): weights are unpacked to their value, and summed in f32 over a whole row.
// Weights are the left factor, as they lie in a row; the right one wants pairs of columns beside each other, which is done to
// activations once for all rows. So a tile of sums has a row of weights in each line, and is turned at its end.
// Included after formats-512.h; with AVX512-BF16.
#pragma once

#include "format-list.h"
#include "kernels.h"
#include "panel-rows.h"
#include "tiles.h"

namespace {

static_assert(SPAC_PANEL_ROWS == 2 * TILE_SIDE && SPAC_ACT_GROUP == TILE_SIDE, "tiles of 2 x 2");

// 32 columns of 16 rows
struct weight_tile {
    alignas(64) uint16_t w[TILE_SIDE][TILE_COLS];
};

static_assert(sizeof(weight_tile) == sizeof(pair_tile), "of bf16");

SPAC_INLINE int64_t n_tiles_of(int64_t n_cols) {
    return (uint64_t) (n_cols + TILE_COLS - 1) / TILE_COLS;
}

size_t tile_panel_bytes(int64_t n_cols) {
    return SPAC_PANEL_ROWS / TILE_SIDE * n_tiles_of(n_cols) * sizeof(weight_tile);
}

SPAC_INLINE __m512i to_bf16(__m512 first, __m512 second) {
    return (__m512i) _mm512_cvtne2ps_pbh(second, first);
}

// ---- unpacking

// formats of 4 bits with a scale per 32 weights: a table of their 16 values is less work than each weight
template <typename F>
constexpr bool LOOKS_UP = std::is_same_v<F, iq4_nl> || std::is_same_v<F, iq4_xs> || std::is_same_v<F, mxfp4>;
template <typename F>
constexpr bool HAS_TABLE = LOOKS_UP<F> || std::is_same_v<F, q4_0> || std::is_same_v<F, q4_1> || std::is_same_v<F, q4_k>;

SPAC_INLINE __m512 floats_of(__m128i q) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(q));
}

// what 0 to 15 stand for
template <typename F>
SPAC_INLINE __m512 table_of() {
    __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if constexpr (LOOKS_UP<F>) {
        values = _mm512_castsi512_si128(F::table());
    }
    return floats_of(values);
}

// Loads broadcast a scale for nothing; the compiler would take it from a register by two shuffles, of which there is one a cycle.
template <typename T>
SPAC_INLINE void keep_in_memory(T & x) {
    __asm__ volatile("" : "+m"(x));
}

SPAC_INLINE __m512i words_at(const uint8_t * q) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *) q));
}

// 256 weights of a row: places in a table, or bytes; scales
template <typename F>
struct unpacked_weights {
    alignas(64) uint8_t q[4][64];
    alignas(64) float scale[16], offset[16];

    SPAC_INLINE unpacked_weights(const typename F::block * b) {
        weights w;
        if constexpr (LOOKS_UP<F>) {
            w = F::unpack_places(b);
        } else {
            w = unpack<F>(b);
        }
        for (int i = 0; i < 4; i++) {
            _mm512_store_si512(q[i], w.q[i]);
        }
        _mm512_store_ps(scale, w.scale);
        _mm512_store_ps(offset, w.offset);
        keep_in_memory(q);
        keep_in_memory(scale);
        keep_in_memory(offset);
    }

    // 16 values of one scale; lane: of the scale
    SPAC_INLINE __m512 values_of(__m512 x, int lane) const { return _mm512_fmsub_ps(x, _mm512_set1_ps(scale[lane]), _mm512_set1_ps(offset[lane])); }

    // which block of 32 is the i-th pair's first, and its second
    static constexpr int block_of(int i, int b) { return i / 2 + 4 * (i % 2) + 2 * b; }

    SPAC_INLINE void look_up(int i, __m512i * x) const {
        const __m512  all   = table_of<F>();
        const __m512i table = to_bf16(values_of(all, FIRST_LANE[block_of(i, 0)]), values_of(all, FIRST_LANE[block_of(i, 1)]));
        x[0]                = _mm512_permutexvar_epi16(words_at(q[i]), table);
        x[1]                = _mm512_permutexvar_epi16(_mm512_or_si512(words_at(q[i] + 32), _mm512_set1_epi16(16)), table);
    }

    // the second group of a block has the scale of the first, or its own
    SPAC_INLINE void multiply(int i, __m512i * x) const {
        for (int b = 0; b < 2; b++) {
            const __m128i * groups = (const __m128i *) (q[i] + 32 * b);
            const int       first = FIRST_LANE[block_of(i, b)], second = N_SCALES<F> == 1 ? first : first + 4;
            x[b] = to_bf16(values_of(floats_of(_mm_load_si128(groups)), first), values_of(floats_of(_mm_load_si128(groups + 1)), second));
        }
    }
};

// As they lie: 64 weights are the low and the high nibbles of 32 bytes.
template <>
struct unpacked_weights<q4_k> {
    const uint8_t * q;
    alignas(64) float scale[8][2]; // and offset

    SPAC_INLINE unpacked_weights(const spac_block_q4_k * b) :
        q(b->q) {
        // 4 scales, 4 offsets; of the others the low 4 bits are apart. Not in vectors: shuffles are what limits them.
        const uint64_t low_nibbles = 0x0f0f0f0f, top_bits = 0x3030303030303030, bits = 0x3f3f3f3f3f3f3f3f;
        uint64_t       first;
        uint32_t       last, both;
        memcpy(&first, b->scales, sizeof(first));
        memcpy(&last, b->scales + 8, sizeof(last));
        memcpy(&both, &b->d, sizeof(both));
        const uint64_t second = (first >> 2 & top_bits) | (last & low_nibbles) | (uint64_t) (last >> 4 & low_nibbles) << 32;
        const __m128i  order  = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        const __m128i  sizes  = _mm_shuffle_epi8(_mm_set_epi64x((int64_t) second, (int64_t) (first & bits)), order);
        const __m512   d      = _mm512_cvtph_ps(_mm256_set1_epi32((int) both));
        _mm512_store_ps(scale, _mm512_mul_ps(floats_of(sizes), d));
        keep_in_memory(scale);
    }

    static constexpr int block_of(int i, int b) { return 2 * i + b; }

    SPAC_INLINE __m512 values_of(__m512 x, int block) const { return _mm512_fmsub_ps(x, _mm512_set1_ps(scale[block][0]), _mm512_set1_ps(scale[block][1])); }

    SPAC_INLINE void look_up(int i, __m512i * x) const {
        const __m512  all   = table_of<q4_k>();
        const __m512i table = to_bf16(values_of(all, 2 * i), values_of(all, 2 * i + 1)), words = words_at(q + 32 * i);
        x[0] = _mm512_permutexvar_epi16(_mm512_and_si512(words, _mm512_set1_epi16(15)), table);
        x[1] = _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_srli_epi16(words, 4), _mm512_set1_epi16(16)), table);
    }
};

// of which the first n_tiles times 32 are wanted
template <typename F>
SPAC_INLINE void put_weights(const unpacked_weights<F> & w, weight_tile * to, int64_t row, int64_t n_tiles) {
    for (int i = 0; i < 4; i++) { // pairs of blocks of 32
        __m512i x[2];
        if constexpr (HAS_TABLE<F>) {
            w.look_up(i, x);
        } else {
            w.multiply(i, x);
        }
        for (int b = 0; b < 2; b++) {
            if (w.block_of(i, b) < n_tiles) {
                _mm512_store_si512(to[w.block_of(i, b)].w[row], x[b]);
            }
        }
    }
}

// the next n pieces, or what is left
template <typename Unpack>
SPAC_INLINE void for_each_piece(spac_panel_rows & w, int64_t n, Unpack unpack) {
    while (n > 0 && !w.is_unpacked()) {
        const int64_t end = n < w.n_rows - w.row ? w.row + n : w.n_rows, n_tiles = n_tiles_of(w.n_cols);
        weight_tile * to = (weight_tile *) w.panel + (uint64_t) w.col / TILE_COLS;
        n -= end - w.row;
        for (int64_t row = w.row; row < end; row++) {
            unpack(w.rows + row * w.row_bytes, w.col, to + (uint64_t) row / TILE_SIDE * n_tiles, (uint64_t) row % TILE_SIDE);
        }
        w.row = end < w.n_rows ? end : 0;
        w.col += end < w.n_rows ? 0 : SPAC_BLOCK;
    }
}

template <typename F>
void unpack_dot_rows(spac_panel_rows & w, int64_t n) {
    for_each_piece(w, n, [&](const char * row, int64_t i, weight_tile * to, int64_t line) __attribute__((always_inline)) {
        typename F::block         rest[SPAC_BLOCK / F::N];
        const unpacked_weights<F> x(block_at<F>(row, i, w.n_cols, rest, TILE_SIDE * w.row_bytes)); // measured: 16 pieces ahead is better than 32
        if (w.n_cols - i >= SPAC_BLOCK) {
            put_weights<F>(x, to, line, SPAC_BLOCK / TILE_COLS);
        } else {
            put_weights<F>(x, to, line, n_tiles_of(w.n_cols - i));
        }
    });
}

struct f16;
struct bf16;

// rows of bf16
template <typename F>
void unpack_dot_floats(spac_panel_rows & w, int64_t n) {
    for_each_piece(w, n, [&](const char * row, int64_t i, weight_tile * to, int64_t line) __attribute__((always_inline)) {
        for (const int64_t end = i + SPAC_BLOCK; i < end && i < w.n_cols; i += TILE_COLS, to++) {
            const __mmask32 mask = w.n_cols - i < TILE_COLS ? (__mmask32) ((1u << (w.n_cols - i)) - 1) : ~(__mmask32) 0;
            _mm512_store_si512(to->w[line], _mm512_maskz_loadu_epi16(mask, (const uint16_t *) row + i));
        }
    });
}

// ---- activations

// n rows of floats, at most SPAC_ACT_GROUP; behind the last is 0
void interleave_bf16(const float * const * x, int n, int64_t n_cols, char * act) {
    pair_tile * to = (pair_tile *) act;
    weight_tile rows;
    memset((void *) &rows, 0, sizeof(rows));
    for (int64_t i = 0; i < n_cols; i += TILE_COLS, to++) {
        const int64_t   n_left = n_cols - i;
        const __mmask16 first  = n_left < 16 ? (__mmask16) ((1u << n_left) - 1) : 0xFFFF;
        const __mmask16 second = n_left < 16 ? 0 : n_left < 32 ? (__mmask16) ((1u << (n_left - 16)) - 1)
                                                               : 0xFFFF;
        for (int t = 0; t < n; t++) {
            _mm512_store_si512(rows.w[t], to_bf16(_mm512_maskz_loadu_ps(first, x[t] + i), _mm512_maskz_loadu_ps(second, x[t] + i + 16)));
        }
        turn_rows(&rows, (__m512i *) to);
    }
}

// ---- multiplying

// of 2 x 2 tiles: row tile + 2 * token tile
typedef float tile_sums[4][TILE_SIDE][TILE_SIDE];

// 16 rows of n tokens to their places
SPAC_INLINE void put_sums(const float (*sums)[TILE_SIDE], int64_t n_rows, float * const * out, int n, int64_t r) {
    __m512i         x[TILE_SIDE];
    const __mmask16 mask = n_rows < TILE_SIDE ? (__mmask16) ((1u << n_rows) - 1) : 0xFFFF;
    turn_rows(sums, x);
    for (int t = 0; t < n; t++) {
        _mm512_mask_storeu_epi32(out[t] + r, mask, x[t]);
    }
}

typedef void (*unpack_pieces)(spac_panel_rows & w, int64_t n);

// Vectors' work beside tiles' products: those of the first tokens unpack the columns ahead, later ones' put the sums of the tokens
// before to their places.
struct beside_tiles {
    static constexpr int N_PUTS = 4; // tiles

    spac_panel_rows &   w;
    const unpack_pieces unpack;
    int64_t             end_col = 0; // of what is to be unpacked now

    const tile_sums * sums     = nullptr; // of n_tokens
    float * const *   out      = nullptr;
    int               n_tokens = 0, n_put = N_PUTS;

    beside_tiles(spac_panel_rows & w, unpack_pieces unpack) :
        w(w), unpack(unpack) {}

    void begin_put(const tile_sums * of, float * const * to, int n) {
        sums     = of;
        out      = to;
        n_tokens = n;
        n_put    = 0;
    }

    // both tiles of a token's rows after each other: they are two lines beside each other
    void put() {
        const int     t = n_put / 2 * TILE_SIDE, n = n_tokens - t < TILE_SIDE ? n_tokens - t : TILE_SIDE;
        const int64_t r = n_put % 2 * TILE_SIDE;
        if (r < w.n_rows && n > 0) {
            put_sums((*sums)[n_put], w.n_rows - r, out + t, n, r);
        }
        n_put++;
    }

    void end_put() {
        while (n_put < N_PUTS) {
            put();
        }
    }

    // columns before `col` are wanted now, those of the block after it next
    void begin_block(int64_t col) {
        while (w.col < col && !w.is_unpacked()) {
            unpack(w, w.n_rows - w.row);
        }
        end_col = col + SPAC_BLOCK < w.n_cols ? col + SPAC_BLOCK : w.n_cols;
    }

    SPAC_INLINE void run(int64_t n_pieces) {
        if (n_put < N_PUTS) {
            put();
        } else if (w.col < end_col) {
            unpack(w, n_pieces);
        }
    }
};

// sums of one or two tiles of rows with one or two of tokens
template <typename Tiles, bool TWO_ROWS, bool TWO_TOKENS>
void add_tiles(const weight_tile * w0, const weight_tile * w1, const pair_tile * a0, const pair_tile * a1, int64_t n_tiles, beside_tiles & work) {
    constexpr int64_t N_STEPS  = SPAC_BLOCK / TILE_COLS;
    constexpr int64_t N_PIECES = SPAC_PANEL_ROWS / N_STEPS;
    for (int64_t i = 0; i < n_tiles; i++) {
        if (i % N_STEPS == 0) {
            work.begin_block((i + N_STEPS) * TILE_COLS);
        }
        Tiles::template load<4>(&w0[i]);
        Tiles::template load<6>(&a0[i]);
        Tiles::template dot<0, 4, 6>();
        if (TWO_ROWS) {
            Tiles::template load<5>(&w1[i]);
            Tiles::template dot<1, 5, 6>();
        }
        if (TWO_TOKENS) {
            Tiles::template load<7>(&a1[i]);
            Tiles::template dot<2, 4, 7>();
        }
        if (TWO_ROWS && TWO_TOKENS) {
            Tiles::template dot<3, 5, 7>();
        }
        work.run(N_PIECES); // measured: the same in smaller pieces between the products
    }
}

// sums of at most 2 x 2 tiles; of the activations' addresses only those of groups are read
template <typename Tiles>
void multiply_2x2(const char * const * acts, int n_acts, beside_tiles & work, tile_sums & sums) {
    const int64_t       n_tiles  = n_tiles_of(work.w.n_cols);
    const bool          two_rows = work.w.n_rows > TILE_SIDE, two_tokens = n_acts > TILE_SIDE;
    const weight_tile * w  = (const weight_tile *) work.w.panel;
    const pair_tile *   a0 = (const pair_tile *) acts[0], *a1 = (const pair_tile *) acts[two_tokens ? TILE_SIDE : 0];
    const auto          add = two_rows && two_tokens ? add_tiles<Tiles, true, true> : two_rows ? add_tiles<Tiles, true, false>
                                                                                  : two_tokens ? add_tiles<Tiles, false, true>
                                                                                               : add_tiles<Tiles, false, false>;
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    add(w, w + n_tiles, a0, a1, n_tiles, work);
    Tiles::template store<0>(sums[0]);
    Tiles::template store<1>(sums[1]);
    Tiles::template store<2>(sums[2]);
    Tiles::template store<3>(sums[3]);
}

template <typename Tiles, unpack_pieces UNPACK>
void multiply_tiles(spac_panel_rows & w, const char * const * acts, int n_acts, float * const * out) {
    constexpr int         N = 2 * TILE_SIDE;
    alignas(64) tile_sums sums[2]; // of these tokens, of those before
    beside_tiles          work(w, UNPACK);
    Tiles::configure();
    for (int t0 = 0; t0 < n_acts; t0 += N) {
        const int n = n_acts - t0 < N ? n_acts - t0 : N;
        for (int t = t0; t < t0 + n; t++) { // where sums go, a line of 16 rows each: they come while tiles are multiplied
            __builtin_prefetch(out[t], 1);
            __builtin_prefetch(out[t] + w.n_rows - 1, 1);
        }
        tile_sums & to = sums[t0 / N % 2];
        multiply_2x2<Tiles>(acts + t0, n, work, to);
        work.end_put(); // of those before
        work.begin_put(&to, out + t0, n);
    }
    Tiles::release();
    work.end_put();
}

// ---- one panel per format

// measured: as fast as AVX-512's panels there, 1.1 to 1.3 times with 32 tokens, 1.4 to 2.3 times with 128
static constexpr int TILE_TOKENS_MIN = TILE_SIDE;

template <typename Tiles>
const spac_panel * find_tile_panel(ggml_type type) {
    if (type == GGML_TYPE_F16) {
        return nullptr; // bf16 would lose three of its bits
    }
    switch (type) {
#define SPAC_CASE(type, kernel, format)                                                                                                           \
    case type:                                                                                                                                    \
        {                                                                                                                                         \
            static const spac_panel panel = { SPAC_ACT_BF16, TILE_TOKENS_MIN, tile_panel_bytes, multiply_tiles<Tiles, unpack_##kernel<format>> }; \
            return &panel;                                                                                                                        \
        }
        SPAC_FOR_EACH_FORMAT(SPAC_CASE)
#undef SPAC_CASE
        default:
            return nullptr;
    }
}

} // namespace
