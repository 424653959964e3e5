// The formats of 1 to 3 bits, and NVFP4: how a quarter of a block of 256 weights becomes signed bytes and scales. Included by
// kernels-neon.cpp after the other formats.
#pragma once

#include "iq-grids.h"

namespace {

SPAC_INLINE uint8x16_t repeat_each(uint8x16_t bytes, int log2_n, int first) {
    static const uint8_t ORDER[16] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    return vqtbl1q_u8(bytes, vaddq_u8(vshlq_u8(vld1q_u8(ORDER), vdupq_n_s8((int8_t) -log2_n)), vdupq_n_u8((uint8_t) first)));
}

// as Q2_K keeps them: bits 2i of 32 bytes are sub-block i of a half
SPAC_INLINE void split_pairs_of_bits(const uint8_t * from, int quarter, uint8x16_t * q) {
    for (int i = 0; i < 4; i++) {
        const int8x16_t down = vdupq_n_s8((int8_t) -(4 * (quarter % 2) + 2 * (i / 2)));
        q[i]                 = vandq_u8(vshlq_u8(vld1q_u8(from + 32 * (quarter / 2) + 16 * (i % 2)), down), vdupq_n_u8(3));
    }
}

// all ones where bit i of 8 bytes is set, of 16 bits from byte 2 * group on
SPAC_INLINE uint8x16_t spread_bits(uint8x8_t bits, int group) {
    static const uint8_t BITS[16] = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };
    return vtstq_u8(repeat_each(vcombine_u8(bits, bits), 3, 2 * group), vld1q_u8(BITS));
}

// ---- a few bits per weight

struct q1_0 {
    typedef spac_block_q1_0 block;
    static constexpr int    N          = 128;
    static constexpr bool   HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        b += quarter / 2;
        for (int i = 0; i < 4; i++) { // 1 or -1
            const uint8x16_t has = spread_bits(vld1_u8(b->q + 8 * (quarter % 2)), i);
            w.q[i]               = vreinterpretq_s8_u8(vorrq_u8(vmvnq_u8(has), vdupq_n_u8(1)));
        }
        w.scale  = vdupq_n_f32(half_to_float(b->d));
        w.offset = zero();
        return w;
    }
};

struct q2_0 {
    typedef spac_block_q2_0 block;
    static constexpr int    N          = 64;
    static constexpr bool   HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        static const int8_t DOWN[16] = { 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6 };
        quarter_weights     w;
        uint8x16_t          q[4];
        b += quarter;
        for (int i = 0; i < 4; i++) {
            q[i] = vandq_u8(vshlq_u8(repeat_each(vld1q_u8(b->q), 2, 4 * i), vld1q_s8(DOWN)), vdupq_n_u8(3));
        }
        subtract(q, 1, w.q);
        w.scale  = vdupq_n_f32(half_to_float(b->d));
        w.offset = zero();
        return w;
    }
};

struct nvfp4 {
    typedef spac_block_nvfp4 block;
    static constexpr int     N          = 64;
    static constexpr bool    HAS_OFFSET = false;

    // 4 bits of exponent and 3 of mantissa: as fp16, 2^8 too small; half of that, since the table holds doubled values
    static SPAC_INLINE float32x4_t scales(const block * b) {
        uint16_t half[4];
        for (int i = 0; i < 4; i++) {
            half[i] = b->e[i] == 0x7F ? 0 : (uint16_t) ((b->e[i] & 0x7F) << 7); // 0x7F: no number, zero in ggml
        }
        return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half))), 128);
    }

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        b += quarter;
        for (int i = 0; i < 4; i++) {
            const uint8x8_t raw = vld1_u8(b->q + 8 * i);
            q[i]                = vcombine_u8(vand_u8(raw, vdup_n_u8(0xF)), vshr_n_u8(raw, 4));
        }
        look_up(MXFP4_VALUES, q, w.q);
        w.scale  = scales(b);
        w.offset = zero();
        return w;
    }
};

struct q2_k {
    typedef spac_block_q2_k block;
    static constexpr int    N          = 256;
    static constexpr bool   HAS_OFFSET = true;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint32_t  s = load_word(b->scales + 4 * quarter);
        quarter_weights w;
        uint8x16_t      q[4];
        split_pairs_of_bits(b->q, quarter, q);
        subtract(q, 0, w.q);
        w.scale  = vmulq_n_f32(bytes_to_floats(s & 0x0f0f0f0f), half_to_float(b->d));
        w.offset = vmulq_n_f32(bytes_to_floats(s >> 4 & 0x0f0f0f0f), half_to_float(b->dmin));
        return w;
    }
};

struct q3_k {
    typedef spac_block_q3_k block;
    static constexpr int    N          = 256;
    static constexpr bool   HAS_OFFSET = false;

    // low nibbles: in 8 bytes, of one half each nibble; high bits: in the last 4, two bits for each of 4 scales
    static SPAC_INLINE float32x4_t scales(const block * b, int quarter) {
        const uint32_t low = load_word(b->scales + 4 * (quarter % 2)) >> (4 * (quarter / 2)) & 0x0f0f0f0f, high = load_word(b->scales + 8) >> (2 * quarter) & 0x03030303;
        return vsubq_f32(bytes_to_floats(low | high << 4), vdupq_n_f32(32));
    }

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        split_pairs_of_bits(b->q, quarter, q);
        for (int i = 0; i < 4; i++) {
            const uint8x16_t has = vtstq_u8(vld1q_u8(b->qh + 16 * (i % 2)), vdupq_n_u8((uint8_t) (1 << (2 * quarter + i / 2))));
            q[i]                 = vorrq_u8(q[i], vandq_u8(has, vdupq_n_u8(4)));
        }
        subtract(q, 4, w.q);
        w.scale  = vmulq_n_f32(scales(b, quarter), half_to_float(b->d));
        w.offset = zero();
        return w;
    }
};

// ---- three values per weight

struct tq2_0 {
    typedef spac_block_tq2_0 block;
    static constexpr int     N          = 256;
    static constexpr bool    HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        split_pairs_of_bits(b->q, quarter, q);
        subtract(q, 1, w.q);
        w.scale  = vdupq_n_f32(half_to_float(b->d));
        w.offset = zero();
        return w;
    }
};

// A byte x is the fraction x / 256. Its first digit in base 3 is what of 3 x goes beyond 256; the rest of 3 x has the others.
struct tq1_0 {
    typedef spac_block_tq1_0 block;
    static constexpr int     N          = 256;
    static constexpr bool    HAS_OFFSET = false;

    // 32 bytes: 5 sub-blocks; 16 bytes: 5 groups; 4 bytes: one, each byte in turn
    static SPAC_INLINE uint8x16_t digits_from(const block * b, int group) {
        static const uint8_t POWERS[5] = { 1, 3, 9, 27, 81 }, OF_LAST[16] = { 1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27 };
        if (group == 15) {
            return vmulq_u8(vreinterpretq_u8_u32(vdupq_n_u32(load_word(b->qh))), vld1q_u8(OF_LAST));
        }
        return group < 10 ? vmulq_u8(vld1q_u8(b->q + 16 * (group % 2)), vdupq_n_u8(POWERS[group / 2])) : vmulq_u8(vld1q_u8(b->q + 32), vdupq_n_u8(POWERS[group - 10]));
    }

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        for (int i = 0; i < 4; i++) { // the first digit less 1
            const uint8x16_t x = digits_from(b, 4 * quarter + i), is_above_0 = vcgtq_u8(x, vdupq_n_u8(85)), is_above_1 = vcgtq_u8(x, vdupq_n_u8(170));
            w.q[i] = vreinterpretq_s8_u8(vsubq_u8(vmvnq_u8(is_above_0), is_above_1));
        }
        w.scale  = vdupq_n_f32(half_to_float(b->d));
        w.offset = zero();
        return w;
    }
};

// ---- grids
//
// at(k) is the index of entry k of a quarter.

// 8 weights at an index: 8 entries
template <typename F>
SPAC_INLINE void look_up_grid(const uint64_t * grid, F at, uint8x16_t * q) {
    for (int i = 0; i < 4; i++) {
        q[i] = vcombine_u8(vcreate_u8(grid[at(2 * i)]), vcreate_u8(grid[at(2 * i + 1)]));
    }
}

// 4 weights at an index: 16 entries
template <typename F>
SPAC_INLINE void look_up_grid(const uint32_t * grid, F at, uint8x16_t * q) {
    for (int i = 0; i < 4; i++) {
        const uint32_t four[4] = { grid[at(4 * i)], grid[at(4 * i + 1)], grid[at(4 * i + 2)], grid[at(4 * i + 3)] };
        q[i]                   = vreinterpretq_u8_u32(vld1q_u32(four));
    }
}

// negative where a weight has a sign
SPAC_INLINE void apply_signs(uint8x8_t signs, int8x16_t * q) {
    for (int i = 0; i < 4; i++) {
        const int8x16_t negative = vreinterpretq_s8_u8(spread_bits(signs, i));
        q[i]                     = vsubq_s8(veorq_s8(q[i], negative), negative);
    }
}

// the eighth of 8 signs makes the number of ones even
SPAC_INLINE uint8x8_t add_eighth_sign(uint8x8_t signs) {
    return vorr_u8(signs, vshl_n_u8(vcnt_u8(signs), 7));
}

// two numbers: 4 times 7 signs, and above them 4 bits
struct sign_words {
    uint32x2_t x;

    explicit SPAC_INLINE sign_words(const uint8_t * first, const uint8_t * second) {
        const uint32_t both[2] = { load_word(first), load_word(second) };
        x                      = vld1_u32(both);
    }

    SPAC_INLINE uint8x8_t signs() const {
        const uint32x2_t low  = vorr_u32(vand_u32(x, vdup_n_u32(0x7F)), vand_u32(vshl_n_u32(x, 1), vdup_n_u32(0x7F00)));
        const uint32x2_t high = vorr_u32(vand_u32(vshl_n_u32(x, 2), vdup_n_u32(0x7F0000)), vand_u32(vshl_n_u32(x, 3), vdup_n_u32(0x7F000000)));
        return add_eighth_sign(vreinterpret_u8_u32(vorr_u32(low, high)));
    }

    // 0.5 plus those 4 bits, times d
    SPAC_INLINE float32x4_t scales(float d) const {
        const float32x2_t each = vmul_n_f32(vadd_f32(vcvt_f32_u32(vshr_n_u32(x, 28)), vdup_n_f32(0.5f)), d);
        return vcombine_f32(vdup_lane_f32(each, 0), vdup_lane_f32(each, 1));
    }
};

// IQ2: scale of each group from its nibble
SPAC_INLINE float32x4_t iq2_scales(uint16_t d, const uint8_t * s) {
    const uint32_t nibbles = (s[0] | s[0] << 4 | s[1] << 16 | s[1] << 20) & 0x0f0f0f0f;
    return vmulq_n_f32(vaddq_f32(bytes_to_floats(nibbles), vdupq_n_f32(0.5f)), half_to_float(d) * 0.25f);
}

template <typename G, typename F>
SPAC_INLINE quarter_weights signed_grid_weights(const G * grid, F at, int8_t offset, uint8x8_t signs, float32x4_t scale) {
    quarter_weights w;
    uint8x16_t      q[4];
    look_up_grid(grid, at, q);
    subtract(q, offset, w.q);
    apply_signs(signs, w.q);
    w.scale  = scale;
    w.offset = zero();
    return w;
}

struct iq2_xxs {
    typedef spac_block_iq2_xxs block;
    static constexpr int       N          = 256;
    static constexpr bool      HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint8_t *  q = b->q + 16 * quarter;
        const sign_words tails(q + 4, q + 12);
        return signed_grid_weights(spac_grids.iq2_xxs, [q](int k) { return q[8 * (k / 4) + k % 4]; }, SPAC_IQ2_OFFSET, tails.signs(), tails.scales(half_to_float(b->d) * 0.25f));
    }
};

struct iq2_xs {
    typedef spac_block_iq2_xs block;
    static constexpr int      N          = 256;
    static constexpr bool     HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint16_t * q     = b->q + 8 * quarter;
        const uint8x8_t  signs = add_eighth_sign(vmovn_u16(vshrq_n_u16(vld1q_u16(q), 9)));
        return signed_grid_weights(spac_grids.iq2_xs, [q](int k) { return q[k] & 511; }, SPAC_IQ2_OFFSET, signs, iq2_scales(b->d, b->scales + 2 * quarter));
    }
};

struct iq2_s {
    typedef spac_block_iq2_s block;
    static constexpr int     N          = 256;
    static constexpr bool    HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint8_t *q = b->q + 8 * quarter, *qh = b->qh + 2 * quarter;
        const auto     at = [q, qh](int k) { return q[k] | (qh[k / 4] >> (2 * (k % 4)) & 3) << 8; };
        return signed_grid_weights(spac_grids.iq2_s, at, SPAC_IQ2_OFFSET, vld1_u8(b->signs + 8 * quarter), iq2_scales(b->d, b->scales + 2 * quarter));
    }
};

struct iq3_xxs {
    typedef spac_block_iq3_xxs block;
    static constexpr int       N          = 256;
    static constexpr bool      HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint8_t *  q = b->q + 16 * quarter;
        const sign_words tails(b->signs + 8 * quarter, b->signs + 8 * quarter + 4);
        return signed_grid_weights(spac_grids.iq3_xxs, [q](int k) { return q[k]; }, SPAC_IQ3_XXS_OFFSET, tails.signs(), tails.scales(half_to_float(b->d)));
    }
};

struct iq3_s {
    typedef spac_block_iq3_s block;
    static constexpr int     N          = 256;
    static constexpr bool    HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint8x8_t  qh  = vcreate_u8(b->qh[2 * quarter] | (uint64_t) b->qh[2 * quarter + 1] << 8);
        const uint8x16_t low = vld1q_u8(b->q + 16 * quarter), high = vandq_u8(spread_bits(qh, 0), vdupq_n_u8(1));
        uint16_t         at[16];
        quarter_weights  w;
        uint8x16_t       all[4];
        vst1q_u16(at, vreinterpretq_u16_u8(vzip1q_u8(low, high)));
        vst1q_u16(at + 8, vreinterpretq_u16_u8(vzip2q_u8(low, high)));
        look_up_grid(spac_grids.iq3_s, [&at](int k) { return at[k]; }, all);
        for (uint8x16_t & x : all) { // halves of odd numbers
            x = vaddq_u8(x, x);
        }
        subtract(all, 15, w.q);
        apply_signs(vld1_u8(b->signs + 8 * quarter), w.q);
        const float d = half_to_float(b->d);
        w.scale       = spread_blocks(d * (float) (1 + 2 * (b->scales[quarter] & 15)), d * (float) (1 + 2 * (b->scales[quarter] >> 4)));
        w.offset      = zero();
        return w;
    }
};

// IQ1: all weights of a group are shifted by an eighth, up or down. Bytes are in eighths: 8 times a weight of the grid, plus 1
// or minus 1.
template <typename F>
SPAC_INLINE void set_iq1_bytes(F at, uint8x8_t is_down, int8x16_t * to) {
    uint8x16_t q[4];
    look_up_grid(spac_grids.iq1, at, q);
    for (int i = 0; i < 4; i++) {
        const uint8x16_t down = repeat_each(vcombine_u8(is_down, is_down), 3, 2 * i);
        to[i]                 = vsubq_s8(vreinterpretq_s8_u8(vsubq_u8(vshlq_n_u8(q[i], 3), vaddq_u8(down, down))), vdupq_n_s8(7));
    }
}

struct iq1_s {
    typedef spac_block_iq1_s block;
    static constexpr int     N          = 256;
    static constexpr bool    HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint8_t *  q  = b->q + 8 * quarter;
        const uint16_t * qh = b->qh + 2 * quarter;
        quarter_weights  w;
        const uint32_t   down[2] = { (qh[0] >> 15) * 0x01010101u, (qh[1] >> 15) * 0x01010101u };
        set_iq1_bytes([q, qh](int k) { return q[k] | (qh[k / 4] >> (3 * (k % 4)) & 7) << 8; }, vreinterpret_u8_u32(vld1_u32(down)), w.q);
        const float d = half_to_float(b->d) * 0.125f;
        w.scale       = spread_blocks(d * (float) (2 * (qh[0] >> 12 & 7) + 1), d * (float) (2 * (qh[1] >> 12 & 7) + 1));
        w.offset      = zero();
        return w;
    }
};

struct iq1_m {
    typedef spac_block_iq1_m block;
    static constexpr int     N          = 256;
    static constexpr bool    HAS_OFFSET = false;

    static SPAC_INLINE float d(const block * b) {
        return half_to_float((uint16_t) ((b->scales[0] >> 12) | ((b->scales[1] >> 8) & 0x00f0) | ((b->scales[2] >> 4) & 0x0f00) | (b->scales[3] & 0xf000)));
    }

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint8_t * q     = b->q + 8 * quarter;
        const uint32_t  s     = b->scales[quarter];
        const uint32_t  qh    = load_word(b->qh + 4 * quarter);
        const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(qh >> 3 & 0x11111111)); // of a nibble: the sign of the shift
        const uint8x8_t down  = vand_u8(vzip1_u8(bytes, vshr_n_u8(bytes, 4)), vdup_n_u8(1));
        quarter_weights w;
        set_iq1_bytes([q, qh](int k) { return q[k] | (qh >> (4 * k) & 7) << 8; }, down, w.q);
        const uint32_t n = (s & 7) | (s & 0x38) << 5 | (s & 0x1c0) << 10 | (s & 0xe00) << 15;
        w.scale          = vmulq_n_f32(bytes_to_floats(2 * n + 0x01010101), d(b) * 0.125f);
        w.offset         = zero();
        return w;
    }
};

} // namespace
