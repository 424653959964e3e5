// Vectors of 512 bits: 256 weights of each format, unpacked. Included by who has AVX-512 (F, BW, VL, DQ).
//
// 256 weights become four vectors of unsigned bytes, 16 scales and 16 offsets (weight = scale * q - offset). In each vector a
// 128-bit lane holds one group of 16 weights.
#pragma once

#include "blocks.h"
#include "lowbit-256.h"
#include "simd-helpers.h"

#include <immintrin.h>
#include <stddef.h>
#include <string.h>
#include <type_traits>

namespace {

struct weights {
    __m512i q[4];
    __m512  scale, offset; // in lane order
};

// the groups in the 128-bit lanes of the vectors that unpack() makes: {0,1,4,5}, {8,9,12,13}, {2,3,6,7}, {10,11,14,15}
// lane m of the transposed vectors holds lane m / 4 of vector m % 4
SPAC_INLINE __m512i group_order() {
    return _mm512_setr_epi32(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15);
}

// the same for scales of 32 weights
SPAC_INLINE __m512i block_order() {
    return _mm512_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5, 2, 6, 3, 7, 2, 6, 3, 7);
}

// lane m of unpacked scales is of the first group of a block of 32, the second's is 4 lanes on
constexpr int FIRST_LANE[] = { 0, 2, 8, 10, 1, 3, 9, 11 };

SPAC_INLINE void transpose(__m512i * q) {
    const __m512i lo01 = _mm512_unpacklo_epi32(q[0], q[1]), hi01 = _mm512_unpackhi_epi32(q[0], q[1]);
    const __m512i lo23 = _mm512_unpacklo_epi32(q[2], q[3]), hi23 = _mm512_unpackhi_epi32(q[2], q[3]);
    q[0] = _mm512_unpacklo_epi64(lo01, lo23);
    q[1] = _mm512_unpackhi_epi64(lo01, lo23);
    q[2] = _mm512_unpacklo_epi64(hi01, hi23);
    q[3] = _mm512_unpackhi_epi64(hi01, hi23);
}

// 16 words of 16 rows, 64 bytes apart; rows in lanes
SPAC_INLINE void turn_rows(const void * rows, __m512i * x) {
    __m512i four[4][4]; // words j of lanes 0-3, of four rows
    for (int g = 0; g < 4; g++) {
        for (int i = 0; i < 4; i++) {
            four[g][i] = _mm512_load_si512((const char *) rows + 64 * (4 * g + i));
        }
        transpose(four[g]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i low01 = _mm512_shuffle_i32x4(four[0][j], four[1][j], 0x44), high01 = _mm512_shuffle_i32x4(four[0][j], four[1][j], 0xEE);
        const __m512i low23 = _mm512_shuffle_i32x4(four[2][j], four[3][j], 0x44), high23 = _mm512_shuffle_i32x4(four[2][j], four[3][j], 0xEE);
        x[j]      = _mm512_shuffle_i32x4(low01, low23, 0x88);
        x[j + 4]  = _mm512_shuffle_i32x4(low01, low23, 0xDD);
        x[j + 8]  = _mm512_shuffle_i32x4(high01, high23, 0x88);
        x[j + 12] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
    }
}

SPAC_INLINE __m512i load_halves(const void * a, const void * b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) a)), _mm256_loadu_si256((const __m256i *) b), 1);
}

// 8 floats, one per block of 32, to the lanes
SPAC_INLINE __m512 spread_blocks(__m256 x) {
    return _mm512_permutexvar_ps(block_order(), _mm512_castps256_ps512(x));
}

// whether the first 4 bytes of four blocks lie in a vector
template <typename B>
constexpr bool FOUR_IN_A_VECTOR = 3 * sizeof(B) + 4 <= 64;

// the word at offset BYTE of each of 8 blocks, to the lanes; where blocks have an odd size, an odd block's first byte is the upper half
template <int BYTE, typename B>
SPAC_INLINE __m256i spread_words(const B * b) {
    static_assert(FOUR_IN_A_VECTOR<B> && 4 * sizeof(B) >= 64 && BYTE <= 2, "one of the first two words, and no byte beyond 8 blocks");
    const auto at = [](int i) { return (short) ((BYTE + i % 4 * (int) sizeof(B)) / 2 + i / 4 * 32); };
    return _mm512_castsi512_si256(_mm512_permutex2var_epi16(
        _mm512_loadu_si512(b),
        _mm512_castsi256_si512(_mm256_setr_epi16(at(0), at(4), at(1), at(5), at(0), at(4), at(1), at(5), at(2), at(6), at(3), at(7), at(2), at(6), at(3), at(7))),
        _mm512_loadu_si512(b + 4)));
}

// the same for larger blocks of an even size
template <int BYTE, typename B>
SPAC_INLINE __m256i gather_words(const B * b) {
    static_assert(BYTE == 0 || BYTE == 2, "one of the first two words");
    constexpr __mmask16 LANES[] = { 0x0044, 0x1100, 0x4400, 0x0022, 0x0088, 0x2200, 0x8800 }; // of blocks 1 to 7 in block_order(); there are 7 registers for masks
    const auto          word    = [b](int i) {
        int32_t w;
        memcpy(&w, b + i, sizeof(w));
        return w;
    };
    __m512i x = _mm512_set1_epi32(word(0));
    for (int i = 1; i < 8; i++) {
        x = _mm512_mask_set1_epi32(x, LANES[i - 1], word(i));
    }
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 8 * BYTE));
}

template <int BYTE = 0, typename B>
SPAC_INLINE __m512 spread_halves(const B * b) {
    if constexpr (FOUR_IN_A_VECTOR<B>) {
        return _mm512_cvtph_ps(spread_words<BYTE>(b));
    } else {
        return _mm512_cvtph_ps(gather_words<BYTE>(b));
    }
}

// m of each block, as an offset: it is added, not subtracted
template <typename B>
SPAC_INLINE __m512 spread_minus_m(const B * b) {
    return _mm512_xor_ps(spread_halves<offsetof(B, m)>(b), _mm512_set1_ps(-0.0f));
}

SPAC_INLINE __m512i low_nibbles(__m512i x) {
    return _mm512_and_si512(x, _mm512_set1_epi8(0xF));
}

SPAC_INLINE __m512i high_nibbles(__m512i x) {
    return low_nibbles(_mm512_srli_epi16(x, 4));
}

// the nibbles of two blocks of 16 bytes: the low ones are a group, the high ones the next
SPAC_INLINE __m512i split_blocks(const uint8_t * a, const uint8_t * b) {
    const __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) a));
    const __m512i both  = _mm512_mask_broadcast_i64x2(first, 0xF0, _mm_loadu_si128((const __m128i *) b));
    return low_nibbles(_mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)));
}

// 8 blocks whose nibbles are 16 bytes, and their scales
template <typename F>
SPAC_INLINE weights unpack_nibbles(const typename F::block * b) {
    weights w;
    w.q[0] = split_blocks(b[0].q, b[2].q);
    w.q[1] = split_blocks(b[4].q, b[6].q);
    w.q[2] = split_blocks(b[1].q, b[3].q);
    w.q[3] = split_blocks(b[5].q, b[7].q);
    F::set_scales(b, w);
    return w;
}

// ---- formats: bytes and weights of one block, and how to unpack 256 weights

struct q8_0 {
    typedef spac_block_q8_0 block;
    static constexpr int    N = 32;

    static SPAC_INLINE weights unpack(const block * b) {
        weights w;
        w.q[0]   = load_halves(b[0].q, b[2].q);
        w.q[1]   = load_halves(b[4].q, b[6].q);
        w.q[2]   = load_halves(b[1].q, b[3].q);
        w.q[3]   = load_halves(b[5].q, b[7].q);
        w.scale  = spread_halves(b);
        w.offset = _mm512_mul_ps(w.scale, _mm512_set1_ps(128));
        for (__m512i & q : w.q) {
            q = _mm512_xor_si512(q, _mm512_set1_epi8((char) 0x80));
        }
        return w;
    }
};

struct q4_0 {
    typedef spac_block_q4_0 block;
    static constexpr int    N = 32;

    static SPAC_INLINE void set_scales(const block * b, weights & w) {
        w.scale  = spread_halves(b);
        w.offset = _mm512_mul_ps(w.scale, _mm512_set1_ps(8));
    }

    static SPAC_INLINE weights unpack(const block * b) { return unpack_nibbles<q4_0>(b); }
};

struct q4_1 {
    typedef spac_block_q4_1 block;
    static constexpr int    N = 32;

    static SPAC_INLINE void set_scales(const block * b, weights & w) {
        w.scale  = spread_halves(b);
        w.offset = spread_minus_m(b);
    }

    static SPAC_INLINE weights unpack(const block * b) { return unpack_nibbles<q4_1>(b); }
};

// adds 16 where two blocks have a high bit
template <typename B>
SPAC_INLINE __m512i add_high_bits(__m512i q, const B & first, const B & second) {
    uint32_t bits[2];
    memcpy(&bits[0], first.qh, 4);
    memcpy(&bits[1], second.qh, 4);
    return _mm512_mask_add_epi8(q, bits[0] | (uint64_t) bits[1] << 32, q, _mm512_set1_epi8(16));
}

template <typename F>
SPAC_INLINE weights unpack_nibbles_5(const typename F::block * b) {
    weights w = unpack_nibbles<F>(b);
    w.q[0]    = add_high_bits(w.q[0], b[0], b[2]);
    w.q[1]    = add_high_bits(w.q[1], b[4], b[6]);
    w.q[2]    = add_high_bits(w.q[2], b[1], b[3]);
    w.q[3]    = add_high_bits(w.q[3], b[5], b[7]);
    return w;
}

struct q5_0 {
    typedef spac_block_q5_0 block;
    static constexpr int    N = 32;

    static SPAC_INLINE void set_scales(const block * b, weights & w) {
        w.scale  = spread_halves(b);
        w.offset = _mm512_mul_ps(w.scale, _mm512_set1_ps(16));
    }

    static SPAC_INLINE weights unpack(const block * b) { return unpack_nibbles_5<q5_0>(b); }
};

struct q5_1 {
    typedef spac_block_q5_1 block;
    static constexpr int    N = 32;

    static SPAC_INLINE void set_scales(const block * b, weights & w) {
        w.scale  = spread_halves(b);
        w.offset = spread_minus_m(b);
    }

    static SPAC_INLINE weights unpack(const block * b) { return unpack_nibbles_5<q5_1>(b); }
};

// formats whose nibbles are places in a table of bytes, which F::table() has in each lane
template <typename F>
SPAC_INLINE weights look_up(weights w) {
    for (__m512i & q : w.q) {
        q = _mm512_shuffle_epi8(F::table(), q);
    }
    return w;
}

// the values of IQ4_NL and IQ4_XS, plus 128
SPAC_INLINE __m512i iq4_table() {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, (char) 129, (char) 141, (char) 153, (char) 166, (char) 181,
                                                (char) 197, (char) 217, (char) 241));
}

struct iq4_nl {
    typedef spac_block_iq4_nl block;
    static constexpr int      N = 32;

    static SPAC_INLINE __m512i table() { return iq4_table(); }

    static SPAC_INLINE void set_scales(const block * b, weights & w) {
        w.scale  = spread_halves(b);
        w.offset = _mm512_mul_ps(w.scale, _mm512_set1_ps(128));
    }

    static SPAC_INLINE weights unpack_places(const block * b) { return unpack_nibbles<iq4_nl>(b); }

    static SPAC_INLINE weights unpack(const block * b) { return look_up<iq4_nl>(unpack_places(b)); }
};

struct mxfp4 {
    typedef spac_block_mxfp4 block;
    static constexpr int     N = 32;

    // half of 2^(e - 127), since the table holds doubled values; e = 0 and 1 give subnormals
    static SPAC_INLINE __m512 scales(const block * b) {
        const __m256i odd    = _mm256_setr_epi16(0, 0, 8, 8, 0, 0, 8, 8, 0, 0, 8, 8, 0, 0, 8, 8); // blocks 1, 3, 5, 7 begin at odd bytes
        const __m512i e      = _mm512_cvtepu16_epi32(_mm256_and_si256(_mm256_srlv_epi16(spread_words<0>(b), odd), _mm256_set1_epi16(0xFF)));
        const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        const __m512i tiny   = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
        return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), normal, tiny));
    }

    // doubled values plus 12
    static SPAC_INLINE __m512i table() {
        return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    }

    static SPAC_INLINE void set_scales(const block * b, weights & w) {
        w.scale  = scales(b);
        w.offset = _mm512_mul_ps(w.scale, _mm512_set1_ps(12));
    }

    static SPAC_INLINE weights unpack_places(const block * b) { return unpack_nibbles<mxfp4>(b); }

    static SPAC_INLINE weights unpack(const block * b) { return look_up<mxfp4>(unpack_places(b)); }
};

// 8 scales, then 8 mins
SPAC_INLINE __m512 unpack_k_scales(const uint8_t * scales) {
    uint32_t u[3];
    memcpy(u, scales, sizeof(u));
    const __m128i bytes = _mm_setr_epi32((int) (u[0] & 0x3f3f3f3f), (int) ((u[2] & 0x0f0f0f0f) | ((u[0] >> 2) & 0x30303030)),
                                         (int) (u[1] & 0x3f3f3f3f), (int) (((u[2] >> 4) & 0x0f0f0f0f) | ((u[1] >> 2) & 0x30303030)));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

template <typename B>
SPAC_INLINE void set_k_scales(const B * b, weights & w) {
    const __m512 both = unpack_k_scales(b->scales);
    w.scale           = _mm512_mul_ps(_mm512_permutexvar_ps(block_order(), both), _mm512_set1_ps(half_to_float(b->d)));
    w.offset          = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_add_epi32(block_order(), _mm512_set1_epi32(8)), both),
                                      _mm512_set1_ps(half_to_float(b->dmin)));
}

SPAC_INLINE void set_k_nibbles(const uint8_t * from, __m512i * q) {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
    q[0] = low_nibbles(a);
    q[1] = low_nibbles(b);
    q[2] = high_nibbles(a);
    q[3] = high_nibbles(b);
}

struct q4_k {
    typedef spac_block_q4_k block;
    static constexpr int    N = 256;

    static SPAC_INLINE weights unpack(const block * b) {
        weights w;
        set_k_nibbles(b->q, w.q);
        set_k_scales(b, w);
        return w;
    }
};

struct q5_k {
    typedef spac_block_q5_k block;
    static constexpr int    N = 256;

    // adds 16 where qh has bit lo (first 32 bytes) or hi (last 32)
    static SPAC_INLINE __m512i add_bit(__m512i q, __m512i qh, int lo, int hi) {
        const __m512i bit = _mm512_inserti64x4(_mm512_set1_epi8((char) (1 << lo)), _mm256_set1_epi8((char) (1 << hi)), 1);
        return _mm512_mask_add_epi8(q, _mm512_test_epi8_mask(qh, bit), q, _mm512_set1_epi8(16));
    }

    static SPAC_INLINE weights unpack(const block * b) {
        weights w;
        set_k_nibbles(b->q, w.q);
        set_k_scales(b, w);
        const __m512i qh = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *) b->qh));
        w.q[0]           = add_bit(w.q[0], qh, 0, 2);
        w.q[1]           = add_bit(w.q[1], qh, 4, 6);
        w.q[2]           = add_bit(w.q[2], qh, 1, 3);
        w.q[3]           = add_bit(w.q[3], qh, 5, 7);
        return w;
    }
};

struct q6_k {
    typedef spac_block_q6_k block;
    static constexpr int    N = 256;

    // the two high bits of 64 weights, in place; shift: of the first and the last 32 bytes
    static SPAC_INLINE __m512i high_bits(__m512i qh, __m512i shift) {
        return _mm512_slli_epi16(_mm512_and_si512(_mm512_srlv_epi16(qh, shift), _mm512_set1_epi8(3)), 4);
    }

    // 128 weights, as groups {0,1,4,5} and {2,3,6,7}
    static SPAC_INLINE void unpack_half(const uint8_t * ql, const uint8_t * qh, __m512i & first, __m512i & second) {
        const __m512i raw  = _mm512_loadu_si512(ql);
        const __m512i high = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *) qh));
        const __m512i s02  = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
        const __m512i s46  = _mm512_add_epi16(s02, _mm512_set1_epi16(4));
        const __m512i lo   = _mm512_or_si512(low_nibbles(raw), high_bits(high, s02));
        const __m512i hi   = _mm512_or_si512(high_nibbles(raw), high_bits(high, s46));
        first              = _mm512_shuffle_i64x2(lo, hi, 0x44);
        second             = _mm512_shuffle_i64x2(lo, hi, 0xEE);
    }

    static SPAC_INLINE weights unpack(const block * b) {
        weights w;
        unpack_half(b->ql, b->qh, w.q[0], w.q[2]);
        unpack_half(b->ql + 64, b->qh + 32, w.q[1], w.q[3]);
        const __m512 scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) b->scales)));
        w.scale             = _mm512_mul_ps(_mm512_permutexvar_ps(group_order(), scales), _mm512_set1_ps(half_to_float(b->d)));
        w.offset            = _mm512_mul_ps(w.scale, _mm512_set1_ps(32));
        return w;
    }
};

struct iq4_xs {
    typedef spac_block_iq4_xs block;
    static constexpr int      N = 256;

    static SPAC_INLINE __m256 scales(const block * b) {
        uint32_t packed;
        memcpy(&packed, b->scales_l, sizeof(packed));
        const __m256i low  = _mm256_srlv_epi32(_mm256_set1_epi32((int) packed), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
        const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(b->scales_h), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
        const __m256i both = _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi32(15)),
                                             _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(both, _mm256_set1_epi32(32))), _mm256_set1_ps(half_to_float(b->d)));
    }

    static SPAC_INLINE __m512i table() { return iq4_table(); }

    static SPAC_INLINE void set_scales(const block * b, weights & w) {
        w.scale  = spread_blocks(scales(b));
        w.offset = _mm512_mul_ps(w.scale, _mm512_set1_ps(128));
    }

    static SPAC_INLINE weights unpack_places(const block * b) {
        const uint8_t * q = b->q;
        weights         w;
        w.q[0] = split_blocks(q, q + 32);
        w.q[1] = split_blocks(q + 64, q + 96);
        w.q[2] = split_blocks(q + 16, q + 48);
        w.q[3] = split_blocks(q + 80, q + 112);
        set_scales(b, w);
        return w;
    }

    static SPAC_INLINE weights unpack(const block * b) { return look_up<iq4_xs>(unpack_places(b)); }
};

// ---- formats of 1 to 3 bits

SPAC_INLINE __m512i join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// lane m of a half is of group 2 (m % 4) + m / 4 there
SPAC_INLINE __m512 join_lanes(__m256 low, __m256 high) {
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15);
    return _mm512_permutexvar_ps(order, _mm512_castsi512_ps(join(_mm256_castps_si256(low), _mm256_castps_si256(high))));
}

// 256 weights, unpacked in halves of 128
SPAC_INLINE weights join(const half_weights & a, const half_weights & b) {
    weights w;
    w.q[0]   = join(a.q[0], a.q[2]);
    w.q[1]   = join(b.q[0], b.q[2]);
    w.q[2]   = join(a.q[1], a.q[3]);
    w.q[3]   = join(b.q[1], b.q[3]);
    w.scale  = join_lanes(a.scale, b.scale);
    w.offset = join_lanes(a.offset, b.offset);
    return w;
}

template <typename F>
SPAC_INLINE weights unpack(const typename F::block * b) {
    if constexpr (std::is_base_of_v<unpacked_in_halves, F>) {
        return join(F::unpack(b, 0), F::unpack(b, 1));
    } else {
        return F::unpack(b);
    }
}

} // namespace
