// Vectors of 256 bits: the kernels of AVX2 and of AVX-VNNI, which differ in one instruction and give the same bits.
// Included by kernels-avx2.cpp and kernels-avxvnni.cpp, each built with its own instructions.
//
// As in kernels-avx512.cpp, in halves of 128 weights: four vectors, each with a group of 16 weights per 128-bit lane,
// are transposed so that 32-bit lane m of each holds weights of group 2 (m % 4) + m / 4 of the half. vpmaddubsw adds two
// products in 16 bits, so bytes above 127 would overflow: formats that need them keep a sign, and give it to the
// activation instead.
#pragma once

#include "blocks.h"
#include "half-weights.h"
#include "kernels.h"
#include "lowbit-256.h"
#include "simd-helpers.h"

#include <immintrin.h>
#include <string.h>

namespace {

typedef __m256 vec;

SPAC_INLINE vec zero() {
    return _mm256_setzero_ps();
}

// activations of half a block, as they lie in a spac_act_q8 here
SPAC_INLINE const int8_t * half_q(const spac_act_q8 & a, int half) {
    return a.q + 128 * half;
}

SPAC_INLINE void transpose(__m256i * q) {
    const __m256i lo01 = _mm256_unpacklo_epi32(q[0], q[1]), hi01 = _mm256_unpackhi_epi32(q[0], q[1]);
    const __m256i lo23 = _mm256_unpacklo_epi32(q[2], q[3]), hi23 = _mm256_unpackhi_epi32(q[2], q[3]);
    q[0] = _mm256_unpacklo_epi64(lo01, lo23);
    q[1] = _mm256_unpackhi_epi64(lo01, lo23);
    q[2] = _mm256_unpacklo_epi64(hi01, hi23);
    q[3] = _mm256_unpackhi_epi64(hi01, hi23);
}

// m of each block, as an offset: it is added, not subtracted
template <typename B>
SPAC_INLINE __m256 spread_minus_m(const B * b) {
    const __m128i h = _mm_setr_epi16(b[0].m, b[1].m, b[2].m, b[3].m, 0, 0, 0, 0);
    return spread_blocks(_mm_cvtph_ps(_mm_xor_si128(h, _mm_set1_epi16((short) 0x8000))));
}

template <typename B>
SPAC_INLINE __m256 spread_halves(const B * b) {
    return spread_blocks(_mm_cvtph_ps(_mm_setr_epi16(b[0].d, b[1].d, b[2].d, b[3].d, 0, 0, 0, 0)));
}

// 16 bytes whose low nibbles are one group and whose high nibbles the next
SPAC_INLINE __m256i split_nibbles(const uint8_t * q) {
    const __m128i raw = _mm_loadu_si128((const __m128i *) q);
    return low_nibbles(_mm256_set_m128i(_mm_srli_epi16(raw, 4), raw));
}

// ---- formats: bytes and weights of one block, and how to unpack half of 256 weights

struct q8_0 {
    typedef spac_block_q8_0 block;
    static constexpr int    N         = 32;
    static constexpr bool   IS_SIGNED = true;
    static constexpr int    LARGEST   = 128;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += 4 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = load(b[i].q);
        }
        w.scale  = spread_halves(b);
        w.offset = _mm256_setzero_ps();
        return w;
    }
};

struct q4_0 {
    typedef spac_block_q4_0 block;
    static constexpr int    N         = 32;
    static constexpr bool   IS_SIGNED = false;
    static constexpr int    LARGEST   = 15;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += 4 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = split_nibbles(b[i].q);
        }
        w.scale  = spread_halves(b);
        w.offset = _mm256_mul_ps(w.scale, _mm256_set1_ps(8));
        return w;
    }
};

struct q4_1 {
    typedef spac_block_q4_1 block;
    static constexpr int    N         = 32;
    static constexpr bool   IS_SIGNED = false;
    static constexpr int    LARGEST   = 15;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += 4 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = split_nibbles(b[i].q);
        }
        w.scale  = spread_halves(b);
        w.offset = spread_minus_m(b);
        return w;
    }
};

// 16 in each byte whose bit is set
SPAC_INLINE __m256i high_bits(const uint8_t * qh) {
    uint32_t bits;
    memcpy(&bits, qh, 4);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int) bits), _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i bit    = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit), _mm256_set1_epi8(16));
}

struct q5_0 {
    typedef spac_block_q5_0 block;
    static constexpr int    N         = 32;
    static constexpr bool   IS_SIGNED = false;
    static constexpr int    LARGEST   = 31;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += 4 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = _mm256_or_si256(split_nibbles(b[i].q), high_bits(b[i].qh));
        }
        w.scale  = spread_halves(b);
        w.offset = _mm256_mul_ps(w.scale, _mm256_set1_ps(16));
        return w;
    }
};

struct q5_1 {
    typedef spac_block_q5_1 block;
    static constexpr int    N         = 32;
    static constexpr bool   IS_SIGNED = false;
    static constexpr int    LARGEST   = 31;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += 4 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = _mm256_or_si256(split_nibbles(b[i].q), high_bits(b[i].qh));
        }
        w.scale  = spread_halves(b);
        w.offset = spread_minus_m(b);
        return w;
    }
};

// the values of IQ4_NL and IQ4_XS
SPAC_INLINE __m256i iq4_table() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
}

struct iq4_nl {
    typedef spac_block_iq4_nl block;
    static constexpr int      N         = 32;
    static constexpr bool     IS_SIGNED = true;
    static constexpr int      LARGEST   = 127;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += 4 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = _mm256_shuffle_epi8(iq4_table(), split_nibbles(b[i].q));
        }
        w.scale  = spread_halves(b);
        w.offset = _mm256_setzero_ps();
        return w;
    }
};

struct mxfp4 {
    typedef spac_block_mxfp4 block;
    static constexpr int     N         = 32;
    static constexpr bool    IS_SIGNED = false;
    static constexpr int     LARGEST   = 24;

    // half of 2^(e - 127), since the table holds doubled values; e = 0 and 1 give subnormals
    static SPAC_INLINE __m128 scales(const block * b) {
        const __m128i e      = _mm_setr_epi32(b[0].e, b[1].e, b[2].e, b[3].e);
        const __m128i normal = _mm_slli_epi32(_mm_sub_epi32(e, _mm_set1_epi32(1)), 23);
        const __m128i tiny   = _mm_sllv_epi32(_mm_set1_epi32(0x00200000), e);
        return _mm_castsi128_ps(_mm_blendv_epi8(normal, tiny, _mm_cmplt_epi32(e, _mm_set1_epi32(2))));
    }

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        // doubled values plus 12
        const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        half_weights  w;
        b += 4 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = _mm256_shuffle_epi8(table, split_nibbles(b[i].q));
        }
        w.scale  = spread_blocks(scales(b));
        w.offset = _mm256_mul_ps(w.scale, _mm256_set1_ps(12));
        return w;
    }
};

// word 0 of the 6-bit scales, or of the mins, of 4 sub-blocks; half: which 4
SPAC_INLINE __m128 unpack_k_scales(const uint8_t * scales, int half, bool mins) {
    uint32_t u[3];
    memcpy(u, scales, sizeof(u));
    const uint32_t low  = u[mins] & 0x3f3f3f3f;
    const uint32_t high = ((mins ? u[2] >> 4 : u[2]) & 0x0f0f0f0f) | ((u[mins] >> 2) & 0x30303030);
    return _mm_cvtepi32_ps(_mm_cvtepu8_epi32(_mm_cvtsi32_si128((int) (half ? high : low))));
}

template <typename B>
SPAC_INLINE void set_k_scales(const B * b, int half, half_weights & w) {
    w.scale  = _mm256_mul_ps(spread_blocks(unpack_k_scales(b->scales, half, false)), _mm256_set1_ps(half_to_float(b->d)));
    w.offset = _mm256_mul_ps(spread_blocks(unpack_k_scales(b->scales, half, true)), _mm256_set1_ps(half_to_float(b->dmin)));
}

SPAC_INLINE void set_k_nibbles(const uint8_t * from, __m256i * q) {
    for (int i = 0; i < 2; i++) {
        const __m256i raw = load(from + 32 * i);
        q[2 * i]          = low_nibbles(raw);
        q[2 * i + 1]      = high_nibbles(raw);
    }
}

struct q4_k {
    typedef spac_block_q4_k block;
    static constexpr int    N         = 256;
    static constexpr bool   IS_SIGNED = false;
    static constexpr int    LARGEST   = 15;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        set_k_nibbles(b->q + 64 * half, w.q);
        set_k_scales(b, half, w);
        return w;
    }
};

struct q5_k {
    typedef spac_block_q5_k block;
    static constexpr int    N         = 256;
    static constexpr bool   IS_SIGNED = false;
    static constexpr int    LARGEST   = 31;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        set_k_nibbles(b->q + 64 * half, w.q);
        set_k_scales(b, half, w);
        const __m256i qh = load(b->qh);
        for (int i = 0; i < 4; i++) {
            const __m256i bit = _mm256_set1_epi8((char) (1 << (4 * half + i)));
            const __m256i has = _mm256_cmpeq_epi8(_mm256_and_si256(qh, bit), bit);
            w.q[i]            = _mm256_or_si256(w.q[i], _mm256_and_si256(has, _mm256_set1_epi8(16)));
        }
        return w;
    }
};

struct q6_k {
    typedef spac_block_q6_k block;
    static constexpr int    N         = 256;
    static constexpr bool   IS_SIGNED = false;
    static constexpr int    LARGEST   = 63;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const uint8_t * ql = b->ql + 64 * half;
        const __m256i   qh = load(b->qh + 32 * half), three = _mm256_set1_epi8(3);
        half_weights    w;
        for (int i = 0; i < 2; i++) {
            const __m256i raw  = load(ql + 32 * i);
            const __m256i low  = _mm256_and_si256(_mm256_srli_epi16(qh, 2 * i), three);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(qh, 2 * i + 4), three);
            w.q[i]             = _mm256_or_si256(low_nibbles(raw), _mm256_slli_epi16(low, 4));
            w.q[i + 2]         = _mm256_or_si256(high_nibbles(raw), _mm256_slli_epi16(high, 4));
        }
        const __m128i bytes  = _mm_loadl_epi64((const __m128i *) (b->scales + 8 * half));
        const __m256  scales = _mm256_permutevar8x32_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        w.scale              = _mm256_mul_ps(scales, _mm256_set1_ps(half_to_float(b->d)));
        w.offset             = _mm256_mul_ps(w.scale, _mm256_set1_ps(32));
        return w;
    }
};

struct iq4_xs {
    typedef spac_block_iq4_xs block;
    static constexpr int      N         = 256;
    static constexpr bool     IS_SIGNED = true;
    static constexpr int      LARGEST   = 127;

    static SPAC_INLINE __m128 scales(const block * b, int half) {
        uint16_t packed;
        memcpy(&packed, b->scales_l + 2 * half, sizeof(packed));
        const __m128i low  = _mm_srlv_epi32(_mm_set1_epi32(packed), _mm_setr_epi32(0, 4, 8, 12));
        const __m128i high = _mm_srlv_epi32(_mm_set1_epi32(b->scales_h >> (8 * half)), _mm_setr_epi32(0, 2, 4, 6));
        const __m128i both = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi32(15)), _mm_slli_epi32(_mm_and_si128(high, _mm_set1_epi32(3)), 4));
        return _mm_mul_ps(_mm_cvtepi32_ps(_mm_sub_epi32(both, _mm_set1_epi32(32))), _mm_set1_ps(half_to_float(b->d)));
    }

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        for (int i = 0; i < 4; i++) {
            w.q[i] = _mm256_shuffle_epi8(iq4_table(), split_nibbles(b->q + 64 * half + 16 * i));
        }
        w.scale  = spread_blocks(scales(b, half));
        w.offset = _mm256_setzero_ps();
        return w;
    }
};

// ---- quantised rows

// dot, and the sums of four products of unsigned and signed bytes per lane
SPAC_INLINE __m256i add_products(__m256i dot, __m256i unsigned_bytes, __m256i bytes) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(dot, unsigned_bytes, bytes);
#else
    return _mm256_add_epi32(dot, _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_bytes, bytes), _mm256_set1_epi16(1)));
#endif
}

// pairs of products whose sum fits into 16 bits, rounded down to a power of two: of unsigned bytes of at most `largest` and
// activations of at most 127
constexpr int n_pairs_in_16_bits(int largest) {
    const int n = INT16_MAX / (2 * 127 * largest);
    return n >= 8 ? 8 : n >= 4 ? 4
                    : n >= 2   ? 2
                               : n;
}

// the sums of 16 products per lane, four of each pair of vectors; unsigned bytes of at most LARGEST
template <int LARGEST>
SPAC_INLINE __m256i sum_products(const __m256i * unsigned_bytes, const __m256i * bytes) {
#ifdef __AVXVNNI__
    constexpr int N_IN_16_BITS = 0;
#else
    constexpr int N_IN_16_BITS = n_pairs_in_16_bits(LARGEST); // vectors whose pairs are added there
#endif
    __m256i sum = _mm256_setzero_si256();
    if (N_IN_16_BITS < 2) {
        for (int i = 0; i < 4; i++) {
            sum = add_products(sum, unsigned_bytes[i], bytes[i]);
        }
        return sum;
    }
    __m256i pairs[4];
    for (int i = 0; i < 4; i++) {
        pairs[i] = _mm256_maddubs_epi16(unsigned_bytes[i], bytes[i]);
    }
    const __m256i one = _mm256_set1_epi16(1), a = _mm256_add_epi16(pairs[0], pairs[1]), b = _mm256_add_epi16(pairs[2], pairs[3]);
    return N_IN_16_BITS >= 4 ? _mm256_madd_epi16(_mm256_add_epi16(a, b), one) : _mm256_add_epi32(_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one));
}

template <typename F, int NT>
SPAC_INLINE void add_half(half_weights w, int half, const spac_act_q8 * const * acts, int64_t ib, __m256 * sums) {
    transpose(w.q);
    __m256i size[4]; // magnitudes, where the weights have signs
    for (int i = 0; i < 4; i++) {
        size[i] = F::IS_SIGNED ? _mm256_abs_epi8(w.q[i]) : w.q[i];
    }
    for (int t = 0; t < NT; t++) {
        const spac_act_q8 & a = acts[t][ib];
        __m256i             x[4];
        for (int i = 0; i < 4; i++) {
            x[i] = _mm256_load_si256((const __m256i *) (half_q(a, half) + 32 * i));
            x[i] = F::IS_SIGNED ? _mm256_sign_epi8(x[i], w.q[i]) : x[i];
        }
        const __m256 dot   = _mm256_cvtepi32_ps(sum_products<F::LARGEST>(size, x));
        const __m256 scale = _mm256_mul_ps(w.scale, _mm256_load_ps(a.d + 8 * half));
        sums[t]            = _mm256_fmadd_ps(dot, scale, sums[t]);
        if (!F::IS_SIGNED) {
            sums[t] = _mm256_fnmadd_ps(w.offset, _mm256_load_ps(a.s + 8 * half), sums[t]);
        }
    }
}

template <typename F, int NT>
SPAC_INLINE void add_block(const typename F::block * b, const spac_act_q8 * const * acts, int64_t ib, __m256 * sums) {
    add_half<F, NT>(F::unpack(b, 0), 0, acts, ib, sums);
    add_half<F, NT>(F::unpack(b, 1), 1, acts, ib, sums);
}

SPAC_INLINE float sum_of(__m256 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s        = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// ---- f16 and bf16 rows, f32 activations

struct f16 {
    static SPAC_INLINE __m256 widen(__m128i w) { return _mm256_cvtph_ps(w); }
};

struct bf16 {
    static SPAC_INLINE __m256 widen(__m128i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(w), 16)); }
};

template <typename F, int NT>
void dot_floats(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, float * const * out) {
    constexpr int N_CHAINS = NT <= 2 ? 4 : NT <= 4 ? 2
                                                   : 1; // of additions that need not wait for each other

    for (int64_t ir = 0; ir < n_rows; ir++) {
        const uint16_t * row = (const uint16_t *) (rows + ir * row_bytes);
        __m256           sums[N_CHAINS][NT];
        for (int i = 0; i < N_CHAINS * NT; i++) {
            sums[i % N_CHAINS][i / N_CHAINS] = _mm256_setzero_ps();
        }
        int64_t i = 0;
        for (; i + 8 * N_CHAINS <= n_cols; i += 8 * N_CHAINS) {
            if (i % 32 == 0) {
                prefetch_ahead(row + i, 64);
            }
            for (int k = 0; k < N_CHAINS; k++) {
                const __m256 w = F::widen(_mm_loadu_si128((const __m128i *) (row + i + 8 * k)));
                for (int t = 0; t < NT; t++) {
                    sums[k][t] = _mm256_fmadd_ps(w, _mm256_load_ps((const float *) acts[t] + i + 8 * k), sums[k][t]);
                }
            }
        }
        for (; i < n_cols; i += 8) {
            uint16_t rest[8] = {}; // the activations are padded with zeros
            memcpy(rest, row + i, (n_cols - i < 8 ? n_cols - i : 8) * sizeof(uint16_t));
            const __m256 w = F::widen(_mm_loadu_si128((const __m128i *) rest));
            for (int t = 0; t < NT; t++) {
                sums[0][t] = _mm256_fmadd_ps(w, _mm256_load_ps((const float *) acts[t] + i), sums[0][t]);
            }
        }
        for (int t = 0; t < NT; t++) {
            __m256 sum = sums[0][t];
            for (int k = 1; k < N_CHAINS; k++) {
                sum = _mm256_add_ps(sum, sums[k][t]);
            }
            out[t][ir] = sum_of(sum);
        }
    }
}

// ---- activations

SPAC_INLINE float max_of(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m        = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// 32 floats to bytes; returns the scale that fits them best in the sense of least squares
SPAC_INLINE float quantise_32(const float * x, int8_t * q) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256       v[4], size = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        size = _mm256_max_ps(size, _mm256_andnot_ps(sign, v[i]));
    }
    const float  max     = max_of(size);
    const __m256 inverse = _mm256_set1_ps(max > 0 ? 127 / max : 0);
    __m256i      n[4];
    __m256       xq = _mm256_setzero_ps(), qq = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        n[i]           = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        const __m256 f = _mm256_cvtepi32_ps(n[i]);
        xq             = _mm256_fmadd_ps(v[i], f, xq);
        qq             = _mm256_fmadd_ps(f, f, qq);
    }
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    _mm256_store_si256((__m256i *) q, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    const float sum_qq = sum_of(qq);
    return sum_qq > 0 ? sum_of(xq) / sum_qq : 0;
}

SPAC_INLINE void quantise_128(const float * x, spac_act_q8 * act, int half) {
    alignas(32) int8_t q[128];
    alignas(16) float  d[4];
    __m256i            v[4], sum = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        d[i] = quantise_32(x + 32 * i, q + 32 * i);
        v[i] = load(q + 32 * i);
    }
    transpose(v);
    for (int i = 0; i < 4; i++) {
        _mm256_store_si256((__m256i *) (act->q + 128 * half + 32 * i), v[i]);
        sum = add_products(sum, _mm256_set1_epi8(1), v[i]);
    }
    const __m256 scale = spread_blocks(_mm_load_ps(d));
    _mm256_store_ps(act->d + 8 * half, scale);
    _mm256_store_ps(act->s + 8 * half, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum)));
}

SPAC_INLINE void quantise_256(const float * x, spac_act_q8 * act) {
    quantise_128(x, act, 0);
    quantise_128(x + 128, act, 1);
}

// e^x to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; the power in two factors, so that
// it may be subnormal or infinite
SPAC_INLINE __m256 exp_ps(__m256 x) {
    static const float coefficients[] = { 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f };

    x              = _mm256_max_ps(_mm256_set1_ps(-104), _mm256_min_ps(_mm256_set1_ps(104), x)); // 0 and inf; NaN stays
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256       r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r              = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p       = _mm256_set1_ps(1.0f / 5040);
    for (float c : coefficients) {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    const __m256i power = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(power, 1), bias = _mm256_set1_epi32(127);
    const __m256i second = _mm256_sub_epi32(power, first);
    p                    = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}

SPAC_INLINE __m256 swish_8(__m256 v, float alpha) {
    const __m256 e = exp_ps(_mm256_mul_ps(v, _mm256_set1_ps(-alpha)));
    return _mm256_div_ps(v, _mm256_add_ps(_mm256_set1_ps(1), e));
}

void swish(float * x, int64_t n, float alpha) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(x + i, swish_8(_mm256_loadu_ps(x + i), alpha));
    }
    if (i < n) {
        float rest[8] = {};
        memcpy(rest, x + i, (n - i) * sizeof(float));
        _mm256_storeu_ps(rest, swish_8(_mm256_loadu_ps(rest), alpha));
        memcpy(x + i, rest, (n - i) * sizeof(float));
    }
}

} // namespace

#include "kernel-table.h"
#include "panel-256.h"

// ---- attention

namespace {

static constexpr int LANE_VECS = 2;

SPAC_INLINE void store_ps(float * p, vec x) {
    _mm256_store_ps(p, x);
}

SPAC_INLINE vec set_ps(float x) {
    return _mm256_set1_ps(x);
}

SPAC_INLINE vec add_mul(vec a, vec b, vec c) {
    return _mm256_fmadd_ps(b, c, a);
}

SPAC_INLINE vec mul(vec a, vec b) {
    return _mm256_mul_ps(a, b);
}

SPAC_INLINE vec sub(vec a, vec b) {
    return _mm256_sub_ps(a, b);
}

SPAC_INLINE vec larger(vec a, vec b) {
    return _mm256_max_ps(a, b);
}

SPAC_INLINE vec widen_halves(const uint16_t * p) {
    return f16::widen(_mm_loadu_si128((const __m128i *) p));
}

} // namespace

#include "attention-lanes.h"
