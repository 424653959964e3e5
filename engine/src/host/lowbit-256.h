// The formats of 1 to 3 bits, and NVFP4: how half of 256 weights is unpacked to unsigned bytes, at most 127, with AVX2. For
// the kernels of every set with AVX2.
#pragma once

#include "half-weights.h"
#include "iq-grids.h"
#include "simd-helpers.h"

#include <string.h>

namespace {

// what a kernel with wider vectors knows these formats by
struct unpacked_in_halves {
    static constexpr bool IS_SIGNED = false;
};

template <typename T>
SPAC_INLINE T load_as(const void * p) {
    T x;
    memcpy(&x, p, sizeof(x));
    return x;
}

SPAC_INLINE __m128i load_16_bytes(const void * p) {
    return _mm_loadu_si128((const __m128i *) p);
}

// 8 bytes, one per group in lane order
SPAC_INLINE __m256 bytes_to_floats(uint64_t bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t) bytes)));
}

// 8 nibbles in the order of the groups: first low, then high nibbles are lane order
SPAC_INLINE uint64_t nibbles_to_lanes(uint32_t x) {
    return (x & 0x0f0f0f0f) | (uint64_t) ((x >> 4) & 0x0f0f0f0f) << 32;
}

SPAC_INLINE __m128i groups_to_lanes(__m128i bytes) {
    return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1));
}

// as Q2_K keeps them: bits 2i of 32 bytes are sub-block i
SPAC_INLINE void set_pairs_of_bits(const uint8_t * from, __m256i * q) {
    const __m256i raw = load(from), three = _mm256_set1_epi8(3);
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_and_si256(_mm256_srli_epi16(raw, 2 * i), three);
    }
}

// ---- a few bits per weight

// 32 bits, one to a byte
SPAC_INLINE __m256i spread_bits(const uint8_t * bits) {
    const __m256i eight_each = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i spread     = _mm256_shuffle_epi8(_mm256_set1_epi32(load_as<int32_t>(bits)), eight_each);
    return _mm256_min_epu8(_mm256_and_si256(spread, _mm256_set1_epi64x((int64_t) 0x8040201008040201)), _mm256_set1_epi8(1));
}

// 32 pairs of bits: each byte in four; of these bits 0-1 as they are, bits 2-3 times 4, bits 4-5 and 6-7 in the same way; then as numbers
SPAC_INLINE __m256i spread_pairs_of_bits(const uint8_t * bits) {
    const __m256i four_each = _mm256_setr_epi64x(0x0101010100000000, 0x0303030302020202, 0x0505050504040404, 0x0707070706060606);
    const __m256i numbers   = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0));
    const __m256i bytes     = _mm256_shuffle_epi8(_mm256_set1_epi64x(load_as<int64_t>(bits)), four_each);
    const __m256i nibbles   = _mm256_blend_epi16(bytes, _mm256_srli_epi16(bytes, 4), 0xAA);
    return _mm256_shuffle_epi8(numbers, _mm256_and_si256(nibbles, _mm256_set1_epi16(0x0C03)));
}

struct q1_0 : unpacked_in_halves {
    typedef spac_block_q1_0 block;
    static constexpr int    N = 128, LARGEST = 1;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = spread_bits(b->q + 4 * i);
        }
        w.offset = _mm256_set1_ps(half_to_float(b->d));
        w.scale  = _mm256_add_ps(w.offset, w.offset);
        return w;
    }
};

struct q2_0 : unpacked_in_halves {
    typedef spac_block_q2_0 block;
    static constexpr int    N = 64, LARGEST = 3;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        b += 2 * half;
        for (int i = 0; i < 4; i++) {
            w.q[i] = spread_pairs_of_bits(b[i / 2].q + 8 * (i % 2));
        }
        w.scale  = spread_blocks(_mm_cvtph_ps(_mm_setr_epi16(b[0].d, b[0].d, b[1].d, b[1].d, 0, 0, 0, 0)));
        w.offset = w.scale;
        return w;
    }
};

struct nvfp4 : unpacked_in_halves {
    typedef spac_block_nvfp4 block;
    static constexpr int     N = 64, LARGEST = 24;

    // 4 bits of exponent and 3 of mantissa: as fp16, 2^8 too small; half of that, since the table holds doubled values
    static SPAC_INLINE __m256 scales(const block * b) {
        const __m128i e     = groups_to_lanes(_mm_unpacklo_epi32(_mm_cvtsi32_si128(load_as<int32_t>(b[0].e)), _mm_cvtsi32_si128(load_as<int32_t>(b[1].e))));
        const __m128i value = _mm_and_si128(_mm_andnot_si128(_mm_cmpeq_epi8(e, _mm_set1_epi8(0x7F)), e), _mm_set1_epi8(0x7F)); // 0x7F: no number, zero in ggml
        return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(value), 7)), _mm256_set1_ps(128));
    }

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        // doubled values plus 12
        const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        half_weights  w;
        b += 2 * half;
        for (int i = 0; i < 2; i++) {
            const __m256i raw = _mm256_permute4x64_epi64(load(b[i].q), 0xD8); // groups 0, 2 | 1, 3
            const __m256i lo = _mm256_shuffle_epi8(table, low_nibbles(raw)), hi = _mm256_shuffle_epi8(table, high_nibbles(raw));
            w.q[2 * i]     = _mm256_unpacklo_epi64(lo, hi);
            w.q[2 * i + 1] = _mm256_unpackhi_epi64(lo, hi);
        }
        w.scale  = scales(b);
        w.offset = _mm256_mul_ps(w.scale, _mm256_set1_ps(12));
        return w;
    }
};

struct q2_k : unpacked_in_halves {
    typedef spac_block_q2_k block;
    static constexpr int    N = 256, LARGEST = 3;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        set_pairs_of_bits(b->q + 32 * half, w.q);
        const __m128i both = groups_to_lanes(_mm_loadl_epi64((const __m128i *) (b->scales + 8 * half))), low = _mm_set1_epi8(0xF);
        const __m256i scales = _mm256_cvtepu8_epi32(_mm_and_si128(both, low)), mins = _mm256_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(both, 4), low));
        w.scale  = _mm256_mul_ps(_mm256_cvtepi32_ps(scales), _mm256_set1_ps(half_to_float(b->d)));
        w.offset = _mm256_mul_ps(_mm256_cvtepi32_ps(mins), _mm256_set1_ps(half_to_float(b->dmin)));
        return w;
    }
};

struct q3_k : unpacked_in_halves {
    typedef spac_block_q3_k block;
    static constexpr int    N = 256, LARGEST = 7;

    // low nibbles: in 8 bytes, of one half each nibble; high bits: in the last 4, two bits for each of 4 scales
    static SPAC_INLINE __m256 scales(const block * b, int half) {
        const uint64_t low  = (load_as<uint64_t>(b->scales) >> (4 * half)) & 0x0f0f0f0f0f0f0f0f;
        const uint32_t rest = load_as<uint32_t>(b->scales + 8) >> (4 * half);
        const uint64_t high = (rest & 0x03030303) | (uint64_t) ((rest >> 2) & 0x03030303) << 32;
        const __m128i  all  = groups_to_lanes(_mm_cvtsi64_si128((int64_t) (low | high << 4)));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(all), _mm256_set1_epi32(32)));
    }

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m256i qh = half ? _mm256_srli_epi16(load(b->qh), 4) : load(b->qh), four = _mm256_set1_epi8(4);
        const __m256i high[4] = { _mm256_slli_epi16(qh, 2), _mm256_slli_epi16(qh, 1), qh, _mm256_srli_epi16(qh, 1) };
        half_weights  w;
        set_pairs_of_bits(b->q + 32 * half, w.q);
        for (int i = 0; i < 4; i++) {
            w.q[i] = _mm256_or_si256(w.q[i], _mm256_and_si256(high[i], four));
        }
        w.scale  = _mm256_mul_ps(scales(b, half), _mm256_set1_ps(half_to_float(b->d)));
        w.offset = _mm256_mul_ps(w.scale, _mm256_set1_ps(4));
        return w;
    }
};

// ---- three values per weight

struct tq2_0 : unpacked_in_halves {
    typedef spac_block_tq2_0 block;
    static constexpr int     N = 256, LARGEST = 3;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        half_weights w;
        set_pairs_of_bits(b->q + 32 * half, w.q);
        w.scale = w.offset = _mm256_set1_ps(half_to_float(b->d));
        return w;
    }
};

// A byte x is the fraction x / 256. Its first digit in base 3 is what of 3 x goes beyond 256; the rest of 3 x has the others.
// As there is no comparison of unsigned bytes, they are kept 128 too small, which tripling leaves so.
struct tq1_0 : unpacked_in_halves {
    typedef spac_block_tq1_0 block;
    static constexpr int     N = 256, LARGEST = 2;

    static SPAC_INLINE __m256i first_digit(__m256i x) {
        const __m256i is_above_0 = _mm256_cmpgt_epi8(x, _mm256_set1_epi8(85 - 128)), is_above_1 = _mm256_cmpgt_epi8(x, _mm256_set1_epi8(170 - 128));
        return _mm256_abs_epi8(_mm256_add_epi8(is_above_0, is_above_1));
    }

    static SPAC_INLINE __m256i rest(__m256i x) { return _mm256_add_epi8(x, _mm256_add_epi8(x, x)); }
    static SPAC_INLINE __m128i rest(__m128i x) { return _mm_add_epi8(x, _mm_add_epi8(x, x)); }

    static SPAC_INLINE __m128i minus_128(__m128i x) { return _mm_xor_si128(x, _mm_set1_epi8((char) 0x80)); }

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        // 32 bytes: 5 sub-blocks, the last of which begins the second half
        __m256i x = _mm256_xor_si256(load(b->q), _mm256_set1_epi8((char) 0x80)), all[5];
        for (__m256i & q : all) {
            q = first_digit(x);
            x = rest(x);
        }
        half_weights w;
        w.scale = w.offset = _mm256_set1_ps(half_to_float(b->d));
        if (half == 0) {
            memcpy(w.q, all, sizeof(w.q));
            return w;
        }
        // 16 bytes: 5 groups; 4 bytes: one
        __m128i y[6] = { minus_128(load_16_bytes(b->q + 32)) };
        for (int i = 1; i < 5; i++) {
            y[i] = rest(y[i - 1]);
        }
        const __m128i h = minus_128(_mm_set1_epi32(load_as<int32_t>(b->qh))), h3 = rest(h), h9 = rest(h3), h27 = rest(h9);
        y[5]   = _mm_unpacklo_epi64(_mm_unpacklo_epi32(h, h3), _mm_unpacklo_epi32(h9, h27));
        w.q[0] = all[4];
        for (int i = 0; i < 3; i++) {
            w.q[1 + i] = first_digit(_mm256_set_m128i(y[2 * i + 1], y[2 * i]));
        }
        return w;
    }
};

// ---- grids
//
// What is computed for all of a block's 256 weights is the same in both halves, and the compiler keeps it.

SPAC_INLINE __m128i lane_of(__m256i x, int half) {
    return half ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x);
}

// 8 floats, one per block of 32, to the lanes of a half
SPAC_INLINE __m256 spread_half(__m256 x, int half) {
    return half ? _mm256_permute2f128_ps(x, x, 0x11) : _mm256_permute2f128_ps(x, x, 0x00);
}

// Bytes, each for 8 weights; byte 4 i + l of a lane is for sub-block i of that half, and goes to all 8.
SPAC_INLINE __m256i eight_each(__m256i bytes, int half, int i) {
    const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i both  = half ? _mm256_permute2x128_si256(bytes, bytes, 0x11) : _mm256_permute2x128_si256(bytes, bytes, 0x00);
    return _mm256_shuffle_epi8(both, _mm256_add_epi8(which, _mm256_set1_epi8((char) (4 * i))));
}

// all ones where a weight of sub-block i is negative
SPAC_INLINE __m256i is_negative(__m256i signs, int half, int i) {
    const __m256i bit = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
    return _mm256_cmpeq_epi8(_mm256_and_si256(eight_each(signs, half, i), bit), bit);
}

// q stands for q - offset: its negative, where there is a sign
SPAC_INLINE __m256i apply_signs(__m256i q, __m256i negative, int offset) {
    return _mm256_blendv_epi8(q, _mm256_sub_epi8(_mm256_set1_epi8((char) (2 * offset)), q), negative);
}

// bytes of 7 signs get the eighth, which makes the number of ones even; their highest bits are zero
SPAC_INLINE __m256i add_eighth_sign(__m256i signs) {
    const char    o   = (char) 0x80;
    const __m256i odd = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, o, o, 0, o, 0, 0, o, o, 0, 0, o, 0, o, o, 0));
    const __m256i x   = _mm256_xor_si256(signs, _mm256_srli_epi16(signs, 4));
    return _mm256_or_si256(signs, _mm256_shuffle_epi8(odd, low_nibbles(x)));
}

// 28 bits of 8 numbers each: 7 bits to a byte
SPAC_INLINE __m256i spread_7_bits(__m256i x) {
    const __m256i high = _mm256_and_si256(_mm256_slli_epi32(x, 2), _mm256_set1_epi32(0x3FFF0000));
    x                  = _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(0x3FFF)), high);
    const __m256i odd  = _mm256_and_si256(_mm256_slli_epi16(x, 1), _mm256_set1_epi16(0x7F00));
    return _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi16(0x7F)), odd);
}

// 0.5 plus the 4 bits above them, times d
SPAC_INLINE __m256 scales_above_signs(__m256i x, float d) {
    return _mm256_mul_ps(_mm256_add_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(x, 28)), _mm256_set1_ps(0.5f)), _mm256_set1_ps(d));
}

// 16 weights at 2 indices: loads into one half of a vector, which cost less than inserting
SPAC_INLINE __m128i look_up_16(const uint64_t * grid, uint64_t i, uint64_t j) {
    return _mm_castpd_si128(_mm_loadh_pd(_mm_load_sd((const double *) (grid + i)), (const double *) (grid + j)));
}

// 8 weights at 2 indices; reads up to 12 bytes beyond the second
SPAC_INLINE __m128i look_up_8(const uint32_t * grid, uint64_t i, uint64_t j) {
    return _mm_unpacklo_epi32(_mm_loadu_si32(grid + i), load_16_bytes(grid + j));
}

// a sub-block at indices that are bytes: 4 of 8 weights
SPAC_INLINE __m256i look_up(const uint64_t * grid, const uint8_t * at) {
    return _mm256_set_m128i(look_up_16(grid, at[2], at[3]), look_up_16(grid, at[0], at[1]));
}

// 8 of 4
SPAC_INLINE __m256i look_up(const uint32_t * grid, const uint8_t * at) {
    return _mm256_set_m128i(_mm_unpacklo_epi64(look_up_8(grid, at[4], at[5]), look_up_8(grid, at[6], at[7])),
                            _mm_unpacklo_epi64(look_up_8(grid, at[0], at[1]), look_up_8(grid, at[2], at[3])));
}

// at indices that are words of a number
SPAC_INLINE __m256i look_up(const uint64_t * grid, uint64_t at) {
    return _mm256_set_m128i(look_up_16(grid, (uint16_t) (at >> 32), at >> 48), look_up_16(grid, (uint16_t) at, (uint16_t) (at >> 16)));
}

// 16 weights at 4 indices that are words of a number
SPAC_INLINE __m128i look_up_half(const uint32_t * grid, uint64_t at) {
    return _mm_unpacklo_epi64(look_up_8(grid, (uint16_t) at, (uint16_t) (at >> 16)), look_up_8(grid, (uint16_t) (at >> 32), at >> 48));
}

// 16 indices from the low and high bytes in one lane, 4 in each number: memory would hand them on later
SPAC_INLINE void join_bytes(__m256i low, __m256i high, int lane, uint64_t * at) {
    const __m128i a = lane_of(_mm256_unpacklo_epi8(low, high), lane), b = lane_of(_mm256_unpackhi_epi8(low, high), lane);
    at[0] = (uint64_t) _mm_cvtsi128_si64(a);
    at[1] = (uint64_t) _mm_extract_epi64(a, 1);
    at[2] = (uint64_t) _mm_cvtsi128_si64(b);
    at[3] = (uint64_t) _mm_extract_epi64(b, 1);
    for (int i = 0; i < 4; i++) {
        __asm__("" : "+r"(at[i])); // or compilers take them out of the vector one by one
    }
}

// IQ2: scale of each group from its nibble
SPAC_INLINE void set_iq2_scales(uint16_t d, const uint8_t * nibbles, half_weights & w) {
    const __m256 n = _mm256_add_ps(bytes_to_floats(nibbles_to_lanes(load_as<uint32_t>(nibbles))), _mm256_set1_ps(0.5f));
    w.scale        = _mm256_mul_ps(n, _mm256_set1_ps(half_to_float(d) * 0.25f));
    w.offset       = _mm256_mul_ps(w.scale, _mm256_set1_ps(SPAC_IQ2_OFFSET));
}

struct iq2_xxs : unpacked_in_halves {
    typedef spac_block_iq2_xxs block;
    static constexpr int       N = 256, LARGEST = 2 * SPAC_IQ2_OFFSET;

    // every second number, of 8
    static SPAC_INLINE __m256i tails_of(const block * b) {
        const __m256 all = _mm256_shuffle_ps(_mm256_castsi256_ps(load(b->q)), _mm256_castsi256_ps(load(b->q + 32)), 0xDD);
        return _mm256_permute4x64_epi64(_mm256_castps_si256(all), 0xD8);
    }

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m256i tails = tails_of(b), signs = add_eighth_sign(spread_7_bits(tails));
        half_weights  w;
        for (int i = 0; i < 4; i++) {
            w.q[i] = apply_signs(look_up(spac_grids.iq2_xxs, b->q + 32 * half + 8 * i), is_negative(signs, half, i), SPAC_IQ2_OFFSET);
        }
        w.scale  = spread_half(scales_above_signs(tails, half_to_float(b->d) * 0.25f), half);
        w.offset = _mm256_mul_ps(w.scale, _mm256_set1_ps(SPAC_IQ2_OFFSET));
        return w;
    }
};

struct iq2_xs : unpacked_in_halves {
    typedef spac_block_iq2_xs block;
    static constexpr int      N = 256, LARGEST = 2 * SPAC_IQ2_OFFSET;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m256i lo = load(b->q), hi = load(b->q + 16);
        const __m256i fields = _mm256_packus_epi16(_mm256_srli_epi16(lo, 9), _mm256_srli_epi16(hi, 9));
        const __m256i signs  = add_eighth_sign(_mm256_permute4x64_epi64(fields, 0xD8));

        half_weights w;
        for (int i = 0; i < 4; i++) {
            w.q[i] = apply_signs(look_up(spac_grids.iq2_xs, load_as<uint64_t>(b->q + 16 * half + 4 * i) & 0x01ff01ff01ff01ff), is_negative(signs, half, i), SPAC_IQ2_OFFSET);
        }
        set_iq2_scales(b->d, b->scales + 4 * half, w);
        return w;
    }
};

struct iq2_s : unpacked_in_halves {
    typedef spac_block_iq2_s block;
    static constexpr int     N = 256, LARGEST = 2 * SPAC_IQ2_OFFSET;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m256i signs = load(b->signs);
        uint64_t      at[4];
        half_weights  w;
        join_bytes(load(b->q), spread_pairs_of_bits(b->qh), half, at);
        for (int i = 0; i < 4; i++) {
            w.q[i] = apply_signs(look_up(spac_grids.iq2_s, at[i]), is_negative(signs, half, i), SPAC_IQ2_OFFSET);
        }
        set_iq2_scales(b->d, b->scales + 4 * half, w);
        return w;
    }
};

struct iq3_xxs : unpacked_in_halves {
    typedef spac_block_iq3_xxs block;
    static constexpr int       N = 256, LARGEST = 2 * SPAC_IQ3_XXS_OFFSET;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m256i tails = load(b->signs), signs = add_eighth_sign(spread_7_bits(tails));
        half_weights  w;
        for (int i = 0; i < 4; i++) {
            w.q[i] = apply_signs(look_up(spac_grids.iq3_xxs, b->q + 32 * half + 8 * i), is_negative(signs, half, i), SPAC_IQ3_XXS_OFFSET);
        }
        w.scale  = spread_half(scales_above_signs(tails, half_to_float(b->d)), half);
        w.offset = _mm256_mul_ps(w.scale, _mm256_set1_ps(SPAC_IQ3_XXS_OFFSET));
        return w;
    }
};

struct iq3_s : unpacked_in_halves {
    typedef spac_block_iq3_s block;
    static constexpr int     N = 256, LARGEST = 15;

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m256i signs = load(b->signs);
        const __m256i low = load(b->q + 32 * half), high = spread_bits(b->qh + 4 * half);
        uint64_t      at[8];
        half_weights  w;
        join_bytes(low, high, 0, at);
        join_bytes(low, high, 1, at + 4);
        for (int i = 0; i < 4; i++) { // with a sign 15 - q
            const __m256i flip = _mm256_and_si256(is_negative(signs, half, i), _mm256_set1_epi8(15));
            w.q[i]             = _mm256_xor_si256(_mm256_set_m128i(look_up_half(spac_grids.iq3_s, at[2 * i + 1]), look_up_half(spac_grids.iq3_s, at[2 * i])), flip);
        }
        const uint16_t nibbles = load_as<uint16_t>(b->scales + 2 * half);
        const __m128i  n       = _mm_and_si128(_mm_srlv_epi32(_mm_set1_epi32(nibbles), _mm_setr_epi32(0, 4, 8, 12)), _mm_set1_epi32(15));
        w.scale                = spread_blocks(_mm_mul_ps(_mm_add_ps(_mm_cvtepi32_ps(n), _mm_set1_ps(0.5f)), _mm_set1_ps(4 * half_to_float(b->d))));
        w.offset               = _mm256_mul_ps(w.scale, _mm256_set1_ps(7.5f));
        return w;
    }
};

// IQ1: all weights of a group are shifted by an eighth, up or down

struct iq1_s : unpacked_in_halves {
    typedef spac_block_iq1_s block;
    static constexpr int     N = 256, LARGEST = 2;

    // four times 3 bits of 8 words, as bytes
    static SPAC_INLINE __m256i high_bytes(__m128i x) {
        const __m128i seven = _mm_set1_epi16(7), seven_above = _mm_set1_epi16(0x700);
        const __m128i x01 = _mm_or_si128(_mm_and_si128(x, seven), _mm_and_si128(_mm_slli_epi16(x, 5), seven_above));
        const __m128i x23 = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(x, 6), seven), _mm_and_si128(_mm_srli_epi16(x, 1), seven_above));
        return _mm256_set_m128i(_mm_unpackhi_epi16(x01, x23), _mm_unpacklo_epi16(x01, x23));
    }

    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m128i qh = load_16_bytes(b->qh);
        uint64_t      at[4];
        half_weights  w;
        join_bytes(load(b->q), high_bytes(qh), half, at);
        for (int i = 0; i < 4; i++) {
            w.q[i] = look_up(spac_grids.iq1, at[i]);
        }
        const __m256i x     = _mm256_cvtepi16_epi32(qh); // the highest bit is the sign of the shift
        const __m256i odd   = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(x, 11), _mm256_set1_epi32(14)), _mm256_set1_epi32(1));
        const __m256  scale = _mm256_mul_ps(_mm256_cvtepi32_ps(odd), _mm256_set1_ps(half_to_float(b->d)));
        const __m256  shift = _mm256_blendv_ps(_mm256_set1_ps(0.875f), _mm256_set1_ps(1.125f), _mm256_castsi256_ps(x));
        w.scale             = spread_half(scale, half);
        w.offset            = spread_half(_mm256_mul_ps(scale, shift), half);
        return w;
    }
};

struct iq1_m : unpacked_in_halves {
    typedef spac_block_iq1_m block;
    static constexpr int     N = 256, LARGEST = 18;

    static SPAC_INLINE float d(const block * b) {
        return half_to_float((uint16_t) ((b->scales[0] >> 12) | ((b->scales[1] >> 8) & 0x00f0) | ((b->scales[2] >> 4) & 0x0f00) | (b->scales[3] & 0xf000)));
    }

    // q is in eighths: 8 times a weight of the grid, plus 1 or minus 1, and 9 on top
    static SPAC_INLINE half_weights unpack(const block * b, int half) {
        const __m256i raw = _mm256_cvtepu8_epi16(load_16_bytes(b->qh)), nibbles = _mm256_or_si256(raw, _mm256_slli_epi16(raw, 4));
        const __m256i up = _mm256_srli_epi16(_mm256_andnot_si256(nibbles, _mm256_set1_epi8(8)), 2);
        uint64_t      at[4];
        half_weights  w;
        join_bytes(load(b->q), _mm256_and_si256(nibbles, _mm256_set1_epi8(7)), half, at);
        for (int i = 0; i < 4; i++) {
            w.q[i] = _mm256_add_epi8(_mm256_slli_epi16(look_up(spac_grids.iq1, at[i]), 3), eight_each(up, half, i));
        }
        const __m256i all = _mm256_srlv_epi32(_mm256_set1_epi32(load_as<int32_t>(b->scales + 2 * half)), _mm256_setr_epi32(0, 6, 16, 22, 3, 9, 19, 25));
        const __m256i n   = _mm256_and_si256(all, _mm256_set1_epi32(7));
        const __m256  odd = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(n, n), _mm256_set1_epi32(1)));
        w.scale           = _mm256_mul_ps(odd, _mm256_set1_ps(d(b) * 0.125f));
        w.offset          = _mm256_mul_ps(w.scale, _mm256_set1_ps(9));
        return w;
    }
};

} // namespace
