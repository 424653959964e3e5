// Formats of 1 to 3 bits whose 256 weights are unpacked at once to what transpose() would make of them, at less cost than in
// halves. A word of a vector is of the group that group_order() names. Included by kernels-avx512.cpp.
#pragma once

#include "lowbit-256.h"

namespace {

// to all lanes, without a detour through a register of integers
SPAC_INLINE __m512 half_to_lanes(const uint16_t & d) {
    return _mm512_cvtph_ps(_mm256_set1_epi16((short) d));
}

// ---- 2 and 3 bits

// 32-bit word j of group_order()'s groups, as Q2_K keeps them
SPAC_INLINE void set_pairs_of_bits(const uint8_t * from, __m512i * q) {
    const __m512i raw = _mm512_loadu_si512(from), three = _mm512_set1_epi8(3);
    const __m512i first = _mm512_setr_epi32(0, 8, 0, 8, 4, 12, 4, 12, 0, 8, 0, 8, 4, 12, 4, 12);
    const __m512i shift = _mm512_setr_epi32(0, 0, 2, 2, 0, 0, 2, 2, 4, 4, 6, 6, 4, 4, 6, 6);
    for (int j = 0; j < 4; j++) {
        const __m512i words = _mm512_permutexvar_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(j)), raw);
        q[j]                = _mm512_and_si512(_mm512_srlv_epi32(words, shift), three);
    }
}

// bytes in the order of the groups, to lanes
SPAC_INLINE __m512 bytes_to_lanes(__m128i bytes) {
    const __m128i order = _mm_setr_epi8(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_shuffle_epi8(bytes, order)));
}

template <>
SPAC_INLINE weights unpack_turned<q2_k>(const q2_k::block * b) {
    const __m128i both = load_16_bytes(b->scales), low = _mm_set1_epi8(0xF);
    weights       w;
    set_pairs_of_bits(b->q, w.q);
    w.scale  = _mm512_mul_ps(bytes_to_lanes(_mm_and_si128(both, low)), half_to_lanes(b->d));
    w.offset = _mm512_mul_ps(bytes_to_lanes(_mm_and_si128(_mm_srli_epi16(both, 4), low)), half_to_lanes(b->dmin));
    return w;
}

template <>
SPAC_INLINE weights unpack_turned<q3_k>(const q3_k::block * b) {
    const __m512i high = _mm512_broadcast_i64x4(load(b->qh)), four = _mm512_set1_epi8(4); // bit i of a byte: sub-block i
    const __m512i rotate   = _mm512_setr_epi32(2, 30, 1, 29, 2, 30, 1, 29, 0, 28, 31, 27, 0, 28, 31, 27);
    const __m512i words[4] = { _mm512_shuffle_epi32(high, (_MM_PERM_ENUM) 0x00), _mm512_shuffle_epi32(high, (_MM_PERM_ENUM) 0x55),
                               _mm512_shuffle_epi32(high, (_MM_PERM_ENUM) 0xAA), _mm512_shuffle_epi32(high, (_MM_PERM_ENUM) 0xFF) };
    weights       w;
    set_pairs_of_bits(b->q, w.q);
    for (int j = 0; j < 4; j++) {
        w.q[j] = _mm512_or_si512(w.q[j], _mm512_and_si512(_mm512_rolv_epi32(words[j], rotate), four));
    }
    // low nibbles: 8 low ones, then 8 high ones; high bits: two of each of the last 4 bytes for groups 4 apart
    const __m128i low = _mm_loadl_epi64((const __m128i *) b->scales), rest = _mm_set1_epi32(load_as<int32_t>(b->scales + 8));
    const __m128i nibs = _mm_and_si128(_mm_unpacklo_epi64(low, _mm_srli_epi16(low, 4)), _mm_set1_epi8(0xF));
    const __m128i bits = _mm_and_si128(_mm_srlv_epi32(rest, _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
    const __m128i all  = _mm_sub_epi8(_mm_or_si128(nibs, _mm_slli_epi16(bits, 4)), _mm_set1_epi8(32));
    w.scale            = _mm512_mul_ps(bytes_to_lanes(all), half_to_lanes(b->d));
    w.offset           = _mm512_mul_ps(w.scale, _mm512_set1_ps(4));
    return w;
}

// ---- three values per weight

template <>
SPAC_INLINE weights unpack_turned<tq2_0>(const tq2_0::block * b) {
    weights w;
    set_pairs_of_bits(b->q, w.q);
    w.scale = w.offset = half_to_lanes(b->d);
    return w;
}

// A byte is a fraction of 256. Times 3^n, the rest of its digits in base 3 after the first n is left, and the next digit is
// what three times that has beyond 256. Three quarters of it, rounded down, are found as the mean of complements, which rounds
// up; the highest two bits of that are 3 minus the digit.
template <>
SPAC_INLINE weights unpack_turned<tq1_0>(const tq1_0::block * b) {
    // 32 bytes: 5 sub-blocks; 16 bytes: 5 groups; 4 bytes: one, each byte in turn
#define SPAC_POWERS(last) { 0x10001, 0x510051, 0x30003, 0x10001, 0x10001, 0x510051, 0x30003, 0x30003, 0x90009, 0x90009, 0x1b001b, 0x510051, 0x90009, 0x1b001b, 0x1b001b, last }
    alignas(64) static constexpr uint32_t POWERS[4][16] = { SPAC_POWERS(0x10001), SPAC_POWERS(0x30003), SPAC_POWERS(0x90009), SPAC_POWERS(0x1b001b) };
#undef SPAC_POWERS
    const __m256i rest = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16_bytes(b->q + 32)), _mm_loadu_si32(b->qh), 1);
    const __m512i raw  = _mm512_inserti64x4(_mm512_castsi256_si512(load(b->q)), rest, 1);
    const __m512i low = _mm512_set1_epi16(0xFF), high = _mm512_set1_epi16((short) 0xFF00), ones = _mm512_set1_epi8(-1);
    const __m512i step = _mm512_setr_epi32(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0);
    __m512i       at   = _mm512_setr_epi32(0, 0, 0, 8, 4, 4, 4, 8, 0, 8, 0, 8, 4, 8, 4, 12);
    weights       w;
    for (int j = 0; j < 4; j++) {
        const __m512i times = _mm512_load_si512(POWERS[j]), x = _mm512_permutexvar_epi32(at, raw);
        at                 = _mm512_add_epi32(at, step);
        const __m512i even = _mm512_and_si512(_mm512_mullo_epi16(x, times), low), odd = _mm512_mullo_epi16(_mm512_and_si512(x, high), times);
        const __m512i y = _mm512_xor_si512(_mm512_or_si512(even, odd), ones), mean = _mm512_avg_epu8(y, _mm512_avg_epu8(y, ones));
        w.q[j] = _mm512_and_si512(_mm512_srli_epi16(mean, 6), _mm512_set1_epi8(3));
    }
    w.scale  = _mm512_sub_ps(_mm512_setzero_ps(), half_to_lanes(b->d));
    w.offset = _mm512_add_ps(w.scale, w.scale);
    return w;
}

// ---- grids of 8 weights
//
// Two entries make a group.

// at(k) is the index of entry k. Entries from i on, which is 0, 1, 16 or 17: the first or second of groups 0, 2, 1, 3, 4, 6, 5,
// 7, or those of 8 groups on
template <typename F>
SPAC_INLINE __m512i look_up_entries(const uint64_t * grid, F at, int i) {
    const __m256i low  = _mm256_set_m128i(look_up_16(grid, at(i + 2), at(i + 6)), look_up_16(grid, at(i), at(i + 4)));
    const __m256i high = _mm256_set_m128i(look_up_16(grid, at(i + 10), at(i + 14)), look_up_16(grid, at(i + 8), at(i + 12)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// to words 0 and 1, or 2 and 3, of all groups
SPAC_INLINE void turn_entries(__m512i low, __m512i high, __m512i * q) {
    const __m512 a = _mm512_castsi512_ps(low), b = _mm512_castsi512_ps(high);
    q[0] = _mm512_castps_si512(_mm512_mask_moveldup_ps(a, 0xAAAA, b));
    q[1] = _mm512_castps_si512(_mm512_mask_movehdup_ps(b, 0x5555, a));
}

template <typename F>
SPAC_INLINE void set_grid_weights(const uint64_t * grid, F at, __m512i * q) {
    turn_entries(look_up_entries(grid, at, 0), look_up_entries(grid, at, 16), q);
    turn_entries(look_up_entries(grid, at, 1), look_up_entries(grid, at, 17), q + 2);
}

// a byte of each of 32 entries: in the lanes of groups those of the first entry, or the second, in all bytes
SPAC_INLINE __m512i spread_entries(__m256i bytes, int i) {
    const __m512i first  = _mm512_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0x02020202, 0x06060606, 0x0a0a0a0a, 0x0e0e0e0e, 0, 0x04040404, 0x08080808,
                                             0x0c0c0c0c, 0x02020202, 0x06060606, 0x0a0a0a0a, 0x0e0e0e0e);
    const __m512i blocks = _mm512_permutexvar_epi32(block_order(), _mm512_castsi256_si512(bytes));
    return _mm512_shuffle_epi8(blocks, _mm512_add_epi8(first, _mm512_set1_epi8((char) i)));
}

// IQ2: q stands for q - SPAC_IQ2_OFFSET: its negative, where there is a sign
template <typename F>
SPAC_INLINE void set_iq2_weights(const uint64_t * grid, F at, __m256i signs, __m512i * q) {
    set_grid_weights(grid, at, q);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __mmask64 negative = _mm512_test_epi8_mask(spread_entries(signs, j / 2), _mm512_set1_epi32(j % 2 ? (int) 0x80402010 : 0x08040201));
        q[j]                     = _mm512_mask_sub_epi8(q[j], negative, _mm512_set1_epi8(2 * SPAC_IQ2_OFFSET), q[j]);
    }
}

// two nibbles to a byte
SPAC_INLINE void set_iq2_scales(const uint16_t & d, const uint8_t * nibbles, weights & w) {
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 0, 4, 1, 5, 2, 6, 3, 7, 2, 6, 3, 7);
    const __m512i all   = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *) nibbles), order));
    const __m512i n     = _mm512_and_si512(_mm512_mask_srli_epi32(all, 0xF0F0, all, 4), _mm512_set1_epi32(15));
    w.scale             = _mm512_mul_ps(_mm512_fmadd_ps(_mm512_cvtepi32_ps(n), _mm512_set1_ps(0.25f), _mm512_set1_ps(0.125f)), half_to_lanes(d));
    w.offset            = _mm512_mul_ps(w.scale, _mm512_set1_ps(SPAC_IQ2_OFFSET));
}

template <>
SPAC_INLINE weights unpack_turned<iq2_xxs>(const iq2_xxs::block * b) {
    const __m256i tails = iq2_xxs::tails_of(b);
    weights       w;
    set_iq2_weights(spac_grids.iq2_xxs, [b](int i) { return b->q[8 * (i / 4) + i % 4]; }, add_eighth_sign(spread_7_bits(tails)), w.q);
    w.scale  = _mm512_mul_ps(spread_blocks(scales_above_signs(tails, 0.25f)), half_to_lanes(b->d));
    w.offset = _mm512_mul_ps(w.scale, _mm512_set1_ps(SPAC_IQ2_OFFSET));
    return w;
}

template <>
SPAC_INLINE weights unpack_turned<iq2_xs>(const iq2_xs::block * b) {
    const __m256i lo = load(b->q), hi = load(b->q + 16);
    const __m256i fields = _mm256_packus_epi16(_mm256_srli_epi16(lo, 9), _mm256_srli_epi16(hi, 9));
    weights       w;
    set_iq2_weights(spac_grids.iq2_xs, [b](int i) { return b->q[i] & 511; }, add_eighth_sign(_mm256_permute4x64_epi64(fields, 0xD8)), w.q);
    set_iq2_scales(b->d, b->scales, w);
    return w;
}

// 32 indices
struct joined_bytes {
    uint64_t of_4[8];

    SPAC_INLINE joined_bytes(__m256i low, __m256i high) {
        join_bytes(low, high, 0, of_4);
        join_bytes(low, high, 1, of_4 + 4);
    }

    SPAC_INLINE uint16_t operator()(int i) const { return (uint16_t) (of_4[i / 4] >> (16 * (i % 4))); }
};

template <>
SPAC_INLINE weights unpack_turned<iq2_s>(const iq2_s::block * b) {
    weights w;
    set_iq2_weights(spac_grids.iq2_s, joined_bytes(load(b->q), spread_pairs_of_bits(b->qh)), load(b->signs), w.q);
    set_iq2_scales(b->d, b->scales, w);
    return w;
}

// IQ1: all weights of a group are shifted by an eighth, up or down

template <>
SPAC_INLINE weights unpack_turned<iq1_s>(const iq1_s::block * b) {
    const __m128i qh = load_16_bytes(b->qh);
    weights       w;
    set_grid_weights(spac_grids.iq1, joined_bytes(load(b->q), iq1_s::high_bytes(qh)), w.q);
    const __m256i x     = _mm256_cvtepi16_epi32(qh); // the highest bit is the sign of the shift
    const __m256i odd   = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(x, 11), _mm256_set1_epi32(14)), _mm256_set1_epi32(1));
    const __m256  scale = _mm256_mul_ps(_mm256_cvtepi32_ps(odd), _mm256_set1_ps(half_to_float(b->d)));
    const __m256  shift = _mm256_blendv_ps(_mm256_set1_ps(0.875f), _mm256_set1_ps(1.125f), _mm256_castsi256_ps(x));
    w.scale             = spread_blocks(scale);
    w.offset            = spread_blocks(_mm256_mul_ps(scale, shift));
    return w;
}

template <>
SPAC_INLINE weights unpack_turned<iq1_m>(const iq1_m::block * b) {
    const __m256i raw = _mm256_cvtepu8_epi16(load_16_bytes(b->qh)), nibbles = _mm256_or_si256(raw, _mm256_slli_epi16(raw, 4));
    const __m256i up = _mm256_srli_epi16(_mm256_andnot_si256(nibbles, _mm256_set1_epi8(8)), 2);
    weights       w;
    set_grid_weights(spac_grids.iq1, joined_bytes(load(b->q), _mm256_and_si256(nibbles, _mm256_set1_epi8(7))), w.q);
    for (int j = 0; j < 4; j++) {
        w.q[j] = _mm512_add_epi8(_mm512_slli_epi16(w.q[j], 3), spread_entries(up, j / 2));
    }
    const __m512i fours = _mm512_castsi128_si512(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *) b->scales)));
    const __m512i words = _mm512_permutexvar_epi32(_mm512_srli_epi32(group_order(), 2), fours), three = _mm512_set1_epi32(3);
    const __m512i place = _mm512_mullo_epi32(_mm512_and_si512(group_order(), three), three);
    const __m512i n     = _mm512_and_si512(_mm512_srlv_epi32(words, place), _mm512_set1_epi32(7));
    const __m512  odd   = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(n, n), _mm512_set1_epi32(1)));
    w.scale             = _mm512_mul_ps(odd, _mm512_set1_ps(iq1_m::d(b) * 0.125f));
    w.offset            = _mm512_mul_ps(w.scale, _mm512_set1_ps(9));
    return w;
}

} // namespace
