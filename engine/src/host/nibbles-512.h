// Formats of 4 bits but NVFP4, unpacked in the order that transpose() gives: words of 8 nibbles are moved, and split then,
// with half of the permutations. Included by kernels-avx512.cpp.
#pragma once

#include "formats-512.h"

namespace {

// q[j]: in each lane, word words[lane] + j of the first vector (0-15) or the second (16-31)
SPAC_INLINE void turn_words(__m512i first, __m512i second, __m512i words, __m512i * q) {
    for (int j = 0; j < 4; j++) {
        q[j] = _mm512_permutex2var_epi32(first, _mm512_add_epi32(words, _mm512_set1_epi32(j)), second);
    }
}

// ---- the low nibbles of 16 bytes are a group, the high ones the next

constexpr __mmask16 HIGH_OF_BLOCKS = 0xF0F0; // lanes of high nibbles

SPAC_INLINE void turn_blocks(__m512i first, __m512i second, __m512i * q) {
    turn_words(first, second, _mm512_setr_epi32(0, 16, 4, 20, 0, 16, 4, 20, 8, 24, 12, 28, 8, 24, 12, 28), q);
}

template <typename B>
SPAC_INLINE __m512i load_four(const B * b) {
    __m512i x = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) b[0].q));
    x         = _mm512_mask_broadcast_i64x2(x, 0x0C, _mm_loadu_si128((const __m128i *) b[1].q));
    x         = _mm512_mask_broadcast_i64x2(x, 0x30, _mm_loadu_si128((const __m128i *) b[2].q));
    return _mm512_mask_broadcast_i64x2(x, 0xC0, _mm_loadu_si128((const __m128i *) b[3].q));
}

// ---- what becomes of the nibbles

// Weights: high nibbles are not shifted, so they count 16 times; their scale is divided by 16, which is exact unless a product
// of scales is subnormal. The offset stays.
SPAC_INLINE void keep_nibbles(__mmask16 high, weights & w) {
    const __m512i mask = _mm512_mask_set1_epi32(_mm512_set1_epi8(0x0F), high, (int) 0xF0F0F0F0);
    for (__m512i & q : w.q) {
        q = _mm512_and_si512(q, mask);
    }
    w.scale = _mm512_mask_mul_ps(w.scale, high, w.scale, _mm512_set1_ps(1.0f / 16));
}

// places in F's table
template <typename F>
SPAC_INLINE void look_up_nibbles(weights & w) {
    for (__m512i & q : w.q) {
        q = low_nibbles(_mm512_mask_srli_epi32(q, HIGH_OF_BLOCKS, q, 4));
    }
    w = look_up<F>(w);
}

// ---- formats

template <typename F>
SPAC_INLINE weights take_blocks(const typename F::block * b) {
    weights w;
    turn_blocks(load_four(b), load_four(b + 4), w.q);
    F::set_scales(b, w);
    return w;
}

template <typename F>
SPAC_INLINE weights keep_blocks(const typename F::block * b) {
    weights w = take_blocks<F>(b);
    keep_nibbles(HIGH_OF_BLOCKS, w);
    return w;
}

template <>
SPAC_INLINE weights unpack_turned<q4_0>(const q4_0::block * b) {
    return keep_blocks<q4_0>(b);
}

template <>
SPAC_INLINE weights unpack_turned<q4_1>(const q4_1::block * b) {
    return keep_blocks<q4_1>(b);
}

template <typename F>
SPAC_INLINE weights look_up_blocks(const typename F::block * b) {
    weights w = take_blocks<F>(b);
    look_up_nibbles<F>(w);
    return w;
}

template <>
SPAC_INLINE weights unpack_turned<iq4_nl>(const iq4_nl::block * b) {
    return look_up_blocks<iq4_nl>(b);
}

template <>
SPAC_INLINE weights unpack_turned<mxfp4>(const mxfp4::block * b) {
    return look_up_blocks<mxfp4>(b);
}

template <>
SPAC_INLINE weights unpack_turned<iq4_xs>(const iq4_xs::block * b) {
    weights w;
    turn_blocks(_mm512_loadu_si512(b->q), _mm512_loadu_si512(b->q + 64), w.q);
    iq4_xs::set_scales(b, w);
    look_up_nibbles<iq4_xs>(w);
    return w;
}

// the low nibbles of 32 bytes are two groups, the high ones the next two
constexpr __mmask16 HIGH_OF_K = 0xCCCC;

template <>
SPAC_INLINE weights unpack_turned<q4_k>(const q4_k::block * b) {
    weights w;
    turn_words(_mm512_loadu_si512(b->q), _mm512_loadu_si512(b->q + 64), _mm512_setr_epi32(0, 16, 0, 16, 4, 20, 4, 20, 8, 24, 8, 24, 12, 28, 12, 28), w.q);
    set_k_scales(b, w);
    keep_nibbles(HIGH_OF_K, w);
    return w;
}

} // namespace
