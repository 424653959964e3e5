// 64-bit ARM with the dot product of bytes (Armv8.2 and later). Built with it: nothing in here may be inline elsewhere.
//
// 256 weights are taken in quarters of 64: four vectors, each a group of 16 weights in the order of the file. A transpose
// of 32-bit lanes makes lane m of each hold 4 weights of group m, so that four dot products sum a group per lane. Both
// factors have signs here, so that only formats with a minimum of their own need an offset.
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#    include "blocks.h"
#    include "simd-helpers.h"

#    include <arm_neon.h>
#    include <string.h>

namespace {

typedef float32x4_t vec;

SPAC_INLINE vec zero() {
    return vdupq_n_f32(0);
}

SPAC_INLINE float sum_of(float32x4_t x) {
    return vaddvq_f32(x);
}

struct quarter_weights {
    int8x16_t   q[4];
    float32x4_t scale, offset; // of the groups
};

SPAC_INLINE void transpose(int8x16_t * q) {
    const int32x4_t a = vreinterpretq_s32_s8(q[0]), b = vreinterpretq_s32_s8(q[1]);
    const int32x4_t c = vreinterpretq_s32_s8(q[2]), d = vreinterpretq_s32_s8(q[3]);
    const int64x2_t ab_even = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), ab_odd = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
    const int64x2_t cd_even = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), cd_odd = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
    q[0] = vreinterpretq_s8_s64(vtrn1q_s64(ab_even, cd_even));
    q[1] = vreinterpretq_s8_s64(vtrn1q_s64(ab_odd, cd_odd));
    q[2] = vreinterpretq_s8_s64(vtrn2q_s64(ab_even, cd_even));
    q[3] = vreinterpretq_s8_s64(vtrn2q_s64(ab_odd, cd_odd));
}

// one value per block of 32, to its two groups
SPAC_INLINE float32x4_t spread_blocks(float first, float second) {
    return vcombine_f32(vdup_n_f32(first), vdup_n_f32(second));
}

template <typename B>
SPAC_INLINE float32x4_t spread_halves(const B * b) {
    return spread_blocks(half_to_float(b[0].d), half_to_float(b[1].d));
}

SPAC_INLINE uint32_t load_word(const void * p) {
    uint32_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

// 4 bytes with signs
SPAC_INLINE float32x4_t bytes_to_floats(uint32_t bytes) {
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes))))));
}

SPAC_INLINE uint8x16_t low_nibbles(uint8x16_t x) {
    return vandq_u8(x, vdupq_n_u8(0xF));
}

// 2 blocks whose low nibbles are one group and whose high nibbles the next
template <typename B>
SPAC_INLINE void split_nibbles(const B * b, uint8x16_t * q) {
    for (int i = 0; i < 2; i++) {
        const uint8x16_t raw = vld1q_u8(b[i].q);
        q[2 * i]             = low_nibbles(raw);
        q[2 * i + 1]         = vshrq_n_u8(raw, 4);
    }
}

// 16 where one of 16 bits is set
SPAC_INLINE uint8x16_t high_bits(const uint8_t * qh) {
    static const uint8_t BITS[16] = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };
    const uint8x16_t     both     = vcombine_u8(vdup_n_u8(qh[0]), vdup_n_u8(qh[1]));
    return vandq_u8(vtstq_u8(both, vld1q_u8(BITS)), vdupq_n_u8(16));
}

// bytes less a zero of their own
SPAC_INLINE void subtract(const uint8x16_t * from, int8_t zero_point, int8x16_t * to) {
    for (int i = 0; i < 4; i++) {
        to[i] = vsubq_s8(vreinterpretq_s8_u8(from[i]), vdupq_n_s8(zero_point));
    }
}

SPAC_INLINE void look_up(const int8_t * table, const uint8x16_t * from, int8x16_t * to) {
    const int8x16_t values = vld1q_s8(table);
    for (int i = 0; i < 4; i++) {
        to[i] = vqtbl1q_s8(values, from[i]);
    }
}

// ---- formats: bytes and weights of one block, and how to unpack a quarter of 256 weights

struct q8_0 {
    typedef spac_block_q8_0 block;
    static constexpr int    N          = 32;
    static constexpr bool   HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        b += 2 * quarter;
        for (int i = 0; i < 4; i++) {
            w.q[i] = vld1q_s8(b[i / 2].q + 16 * (i % 2));
        }
        w.scale  = spread_halves(b);
        w.offset = zero();
        return w;
    }
};

struct q4_0 {
    typedef spac_block_q4_0 block;
    static constexpr int    N          = 32;
    static constexpr bool   HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        b += 2 * quarter;
        split_nibbles(b, q);
        subtract(q, 8, w.q);
        w.scale  = spread_halves(b);
        w.offset = zero();
        return w;
    }
};

struct q4_1 {
    typedef spac_block_q4_1 block;
    static constexpr int    N          = 32;
    static constexpr bool   HAS_OFFSET = true;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        b += 2 * quarter;
        split_nibbles(b, q);
        subtract(q, 0, w.q);
        w.scale  = spread_halves(b);
        w.offset = spread_blocks(-half_to_float(b[0].m), -half_to_float(b[1].m));
        return w;
    }
};

template <typename B>
SPAC_INLINE void split_5_bits(const B * b, uint8x16_t * q) {
    split_nibbles(b, q);
    for (int i = 0; i < 4; i++) {
        q[i] = vorrq_u8(q[i], high_bits(b[i / 2].qh + 2 * (i % 2)));
    }
}

struct q5_0 {
    typedef spac_block_q5_0 block;
    static constexpr int    N          = 32;
    static constexpr bool   HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        b += 2 * quarter;
        split_5_bits(b, q);
        subtract(q, 16, w.q);
        w.scale  = spread_halves(b);
        w.offset = zero();
        return w;
    }
};

struct q5_1 {
    typedef spac_block_q5_1 block;
    static constexpr int    N          = 32;
    static constexpr bool   HAS_OFFSET = true;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        b += 2 * quarter;
        split_5_bits(b, q);
        subtract(q, 0, w.q);
        w.scale  = spread_halves(b);
        w.offset = spread_blocks(-half_to_float(b[0].m), -half_to_float(b[1].m));
        return w;
    }
};

// the values of IQ4_NL and IQ4_XS
alignas(16) const int8_t IQ4_VALUES[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

struct iq4_nl {
    typedef spac_block_iq4_nl block;
    static constexpr int      N          = 32;
    static constexpr bool     HAS_OFFSET = false;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        b += 2 * quarter;
        split_nibbles(b, q);
        look_up(IQ4_VALUES, q, w.q);
        w.scale  = spread_halves(b);
        w.offset = zero();
        return w;
    }
};

// doubled
alignas(16) const int8_t MXFP4_VALUES[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

struct mxfp4 {
    typedef spac_block_mxfp4 block;
    static constexpr int     N          = 32;
    static constexpr bool    HAS_OFFSET = false;

    // half of 2^(e - 127), since the table holds doubled values; e = 0 and 1 give subnormals
    static SPAC_INLINE float scale_of(uint8_t e) {
        const uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t) (e - 1) << 23;
        float          value;
        memcpy(&value, &bits, sizeof(value));
        return value;
    }

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        b += 2 * quarter;
        split_nibbles(b, q);
        look_up(MXFP4_VALUES, q, w.q);
        w.scale  = spread_blocks(scale_of(b[0].e), scale_of(b[1].e));
        w.offset = zero();
        return w;
    }
};

// 6-bit scales, or mins, of the 2 sub-blocks of a quarter
SPAC_INLINE float32x4_t spread_k_scales(const uint8_t * scales, int quarter, bool mins, float d) {
    const uint32_t low = load_word(scales + 4 * mins), rest = load_word(scales + 8) >> (4 * mins);
    const uint32_t all = quarter < 2 ? low & 0x3f3f3f3f : (rest & 0x0f0f0f0f) | (low >> 2 & 0x30303030), two = all >> (16 * (quarter % 2));
    return vmulq_n_f32(spread_blocks((float) (two & 63), (float) (two >> 8 & 63)), d);
}

template <typename B>
SPAC_INLINE void set_k_scales(const B * b, int quarter, quarter_weights & w) {
    w.scale  = spread_k_scales(b->scales, quarter, false, half_to_float(b->d));
    w.offset = spread_k_scales(b->scales, quarter, true, half_to_float(b->dmin));
}

SPAC_INLINE void split_k_nibbles(const uint8_t * from, uint8x16_t * q) {
    for (int i = 0; i < 2; i++) {
        const uint8x16_t raw = vld1q_u8(from + 16 * i);
        q[i]                 = low_nibbles(raw);
        q[i + 2]             = vshrq_n_u8(raw, 4);
    }
}

struct q4_k {
    typedef spac_block_q4_k block;
    static constexpr int    N          = 256;
    static constexpr bool   HAS_OFFSET = true;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        split_k_nibbles(b->q + 32 * quarter, q);
        subtract(q, 0, w.q);
        set_k_scales(b, quarter, w);
        return w;
    }
};

struct q5_k {
    typedef spac_block_q5_k block;
    static constexpr int    N          = 256;
    static constexpr bool   HAS_OFFSET = true;

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        split_k_nibbles(b->q + 32 * quarter, q);
        for (int i = 0; i < 4; i++) {
            const uint8x16_t has = vtstq_u8(vld1q_u8(b->qh + 16 * (i % 2)), vdupq_n_u8((uint8_t) (1 << (2 * quarter + i / 2))));
            q[i]                 = vorrq_u8(q[i], vandq_u8(has, vdupq_n_u8(16)));
        }
        subtract(q, 0, w.q);
        set_k_scales(b, quarter, w);
        return w;
    }
};

struct q6_k {
    typedef spac_block_q6_k block;
    static constexpr int    N          = 256;
    static constexpr bool   HAS_OFFSET = false;

    // quarters 0 and 1 share 64 bytes of low bits, as low and high nibbles, and 32 of high bits; so do 2 and 3
    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        const uint8_t * ql = b->ql + 64 * (quarter / 2), *qh = b->qh + 32 * (quarter / 2);
        quarter_weights w;
        uint8x16_t      q[4];
        for (int i = 0; i < 4; i++) {
            const uint8x16_t raw  = vld1q_u8(ql + 16 * i);
            const uint8x16_t low  = quarter % 2 ? vshrq_n_u8(raw, 4) : low_nibbles(raw);
            const int8x16_t  down = vdupq_n_s8((int8_t) -(4 * (quarter % 2) + 2 * (i / 2)));
            const uint8x16_t high = vandq_u8(vshlq_u8(vld1q_u8(qh + 16 * (i % 2)), down), vdupq_n_u8(3));
            q[i]                  = vorrq_u8(low, vshlq_n_u8(high, 4));
        }
        subtract(q, 32, w.q);
        w.scale  = vmulq_n_f32(bytes_to_floats(load_word(b->scales + 4 * quarter)), half_to_float(b->d));
        w.offset = zero();
        return w;
    }
};

struct iq4_xs {
    typedef spac_block_iq4_xs block;
    static constexpr int      N          = 256;
    static constexpr bool     HAS_OFFSET = false;

    static SPAC_INLINE float scale_of(const block * b, int i) {
        const int low = b->scales_l[i / 2] >> (4 * (i % 2)) & 15, high = b->scales_h >> (2 * i) & 3;
        return (float) ((low | high << 4) - 32);
    }

    static SPAC_INLINE quarter_weights unpack(const block * b, int quarter) {
        quarter_weights w;
        uint8x16_t      q[4];
        for (int i = 0; i < 2; i++) {
            const uint8x16_t raw = vld1q_u8(b->q + 32 * quarter + 16 * i);
            q[2 * i]             = low_nibbles(raw);
            q[2 * i + 1]         = vshrq_n_u8(raw, 4);
        }
        look_up(IQ4_VALUES, q, w.q);
        w.scale  = vmulq_n_f32(spread_blocks(scale_of(b, 2 * quarter), scale_of(b, 2 * quarter + 1)), half_to_float(b->d));
        w.offset = zero();
        return w;
    }
};

} // namespace

#    include "lowbit-neon.h"

namespace {

// ---- quantised rows

template <typename F, int NT>
SPAC_INLINE void add_quarter(quarter_weights w, int quarter, const spac_act_q8 * const * acts, int64_t ib, float32x4_t * sums) {
    transpose(w.q);
    for (int t = 0; t < NT; t++) {
        const spac_act_q8 & a   = acts[t][ib];
        int32x4_t           dot = vdupq_n_s32(0);
        for (int i = 0; i < 4; i++) {
            dot = vdotq_s32(dot, w.q[i], vld1q_s8(a.q + 64 * quarter + 16 * i));
        }
        const float32x4_t scale = vmulq_f32(w.scale, vld1q_f32(a.d + 4 * quarter));
        sums[t]                 = vfmaq_f32(sums[t], vcvtq_f32_s32(dot), scale);
        if (F::HAS_OFFSET) {
            sums[t] = vfmsq_f32(sums[t], w.offset, vld1q_f32(a.s + 4 * quarter));
        }
    }
}

template <typename F, int NT>
SPAC_INLINE void add_block(const typename F::block * b, const spac_act_q8 * const * acts, int64_t ib, float32x4_t * sums) {
#    pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++) {
        add_quarter<F, NT>(F::unpack(b, quarter), quarter, acts, ib, sums);
    }
}

// ---- f16 and bf16 rows, f32 activations

struct f16 {
    static SPAC_INLINE float32x4_t widen(uint16x4_t w) { return vcvt_f32_f16(vreinterpret_f16_u16(w)); }
};

struct bf16 {
    static SPAC_INLINE float32x4_t widen(uint16x4_t w) { return vreinterpretq_f32_u32(vshll_n_u16(w, 16)); }
};

template <typename F, int NT>
void dot_floats(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, float * const * out) {
    constexpr int N_CHAINS = NT <= 2 ? 4 : NT <= 4 ? 2
                                                   : 1; // of additions that need not wait for each other

    for (int64_t ir = 0; ir < n_rows; ir++) {
        const uint16_t * row = (const uint16_t *) (rows + ir * row_bytes);
        float32x4_t      sums[N_CHAINS][NT];
        for (int i = 0; i < N_CHAINS * NT; i++) {
            sums[i % N_CHAINS][i / N_CHAINS] = zero();
        }
        int64_t i = 0;
        for (; i + 4 * N_CHAINS <= n_cols; i += 4 * N_CHAINS) {
            if (i % 32 == 0) {
                prefetch_ahead(row + i, 64);
            }
            for (int k = 0; k < N_CHAINS; k++) {
                const float32x4_t w = F::widen(vld1_u16(row + i + 4 * k));
                for (int t = 0; t < NT; t++) {
                    sums[k][t] = vfmaq_f32(sums[k][t], w, vld1q_f32((const float *) acts[t] + i + 4 * k));
                }
            }
        }
        for (; i < n_cols; i += 4) {
            uint16_t rest[4] = {}; // the activations are padded with zeros
            memcpy(rest, row + i, (n_cols - i < 4 ? n_cols - i : 4) * sizeof(uint16_t));
            const float32x4_t w = F::widen(vld1_u16(rest));
            for (int t = 0; t < NT; t++) {
                sums[0][t] = vfmaq_f32(sums[0][t], w, vld1q_f32((const float *) acts[t] + i));
            }
        }
        for (int t = 0; t < NT; t++) {
            float32x4_t sum = sums[0][t];
            for (int k = 1; k < N_CHAINS; k++) {
                sum = vaddq_f32(sum, sums[k][t]);
            }
            out[t][ir] = sum_of(sum);
        }
    }
}

// ---- activations

// 32 floats to bytes; returns the scale that fits them best in the sense of least squares
SPAC_INLINE float quantise_32(const float * x, int8_t * q) {
    float32x4_t v[8], size = zero();
    for (int i = 0; i < 8; i++) {
        v[i] = vld1q_f32(x + 4 * i);
        size = vmaxq_f32(size, vabsq_f32(v[i]));
    }
    const float max     = vmaxvq_f32(size);
    const float inverse = max > 0 ? 127 / max : 0;
    int16x4_t   n[8];
    float32x4_t xq = zero(), qq = zero();
    for (int i = 0; i < 8; i++) {
        const int32x4_t   rounded = vcvtnq_s32_f32(vmulq_n_f32(v[i], inverse));
        const float32x4_t f       = vcvtq_f32_s32(rounded);
        n[i]                      = vqmovn_s32(rounded);
        xq                        = vfmaq_f32(xq, v[i], f);
        qq                        = vfmaq_f32(qq, f, f);
    }
    for (int i = 0; i < 4; i++) {
        vst1_s8(q + 8 * i, vqmovn_s16(vcombine_s16(n[2 * i], n[2 * i + 1])));
    }
    const float sum_xq = sum_of(xq), sum_qq = sum_of(qq);
    return sum_qq > 0 ? sum_xq / sum_qq : sum_xq; // bytes are 0 where a float was no number or infinite: the scale keeps that
}

SPAC_INLINE void quantise_64(const float * x, spac_act_q8 * act, int quarter) {
    int8_t      q[64];
    int8x16_t   v[4];
    const float first = quantise_32(x, q), second = quantise_32(x + 32, q + 32);
    int32x4_t   sum = vdupq_n_s32(0);
    for (int i = 0; i < 4; i++) {
        v[i] = vld1q_s8(q + 16 * i);
    }
    transpose(v);
    for (int i = 0; i < 4; i++) {
        vst1q_s8(act->q + 64 * quarter + 16 * i, v[i]);
        sum = vdotq_s32(sum, v[i], vdupq_n_s8(1));
    }
    const float32x4_t scale = spread_blocks(first, second);
    vst1q_f32(act->d + 4 * quarter, scale);
    vst1q_f32(act->s + 4 * quarter, vmulq_f32(scale, vcvtq_f32_s32(sum)));
}

SPAC_INLINE void quantise_256(const float * x, spac_act_q8 * act) {
    for (int quarter = 0; quarter < 4; quarter++) {
        quantise_64(x + 64 * quarter, act, quarter);
    }
}

// e^x to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; the power in two factors, so that
// it may be subnormal or infinite
SPAC_INLINE float32x4_t exp_ps(float32x4_t x) {
    static const float coefficients[] = { 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f };

    x                   = vmaxq_f32(vdupq_n_f32(-104), vminq_f32(vdupq_n_f32(104), x)); // 0 and inf; NaN stays
    const float32x4_t n = vrndnq_f32(vmulq_n_f32(x, 1.44269504f));
    float32x4_t       r = vfmsq_f32(x, n, vdupq_n_f32(0.693359375f));
    r                   = vfmsq_f32(r, n, vdupq_n_f32(-2.12194440e-4f));
    float32x4_t p       = vdupq_n_f32(1.0f / 5040);
    for (float c : coefficients) {
        p = vfmaq_f32(vdupq_n_f32(c), p, r);
    }
    const int32x4_t power = vcvtnq_s32_f32(n), first = vshrq_n_s32(power, 1), bias = vdupq_n_s32(127);
    const int32x4_t second = vsubq_s32(power, first);
    p                      = vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(first, bias), 23)));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(second, bias), 23)));
}

SPAC_INLINE float32x4_t swish_4(float32x4_t v, float alpha) {
    const float32x4_t e = exp_ps(vmulq_n_f32(v, -alpha));
    return vdivq_f32(v, vaddq_f32(vdupq_n_f32(1), e));
}

void swish(float * x, int64_t n, float alpha) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(x + i, swish_4(vld1q_f32(x + i), alpha));
    }
    if (i < n) {
        float rest[4] = {};
        memcpy(rest, x + i, (n - i) * sizeof(float));
        vst1q_f32(rest, swish_4(vld1q_f32(rest), alpha));
        memcpy(x + i, rest, (n - i) * sizeof(float));
    }
}

} // namespace

#    include "kernel-table.h"
#    include "panel-neon.h"

// ---- attention

namespace {

static constexpr int LANE_VECS = 4;

SPAC_INLINE void store_ps(float * p, vec x) {
    vst1q_f32(p, x);
}

SPAC_INLINE vec set_ps(float x) {
    return vdupq_n_f32(x);
}

SPAC_INLINE vec add_mul(vec a, vec b, vec c) {
    return vfmaq_f32(a, b, c);
}

SPAC_INLINE vec mul(vec a, vec b) {
    return vmulq_f32(a, b);
}

SPAC_INLINE vec sub(vec a, vec b) {
    return vsubq_f32(a, b);
}

SPAC_INLINE vec larger(vec a, vec b) {
    return vmaxq_f32(a, b);
}

SPAC_INLINE vec widen_halves(const uint16_t * p) {
    return f16::widen(vld1_u16(p));
}

} // namespace

#    include "attention-lanes.h"

static const spac_kernels kernels = { "neon", quantise, find_dot, swish, find_panel, &attention };

const spac_kernels * spac_kernels_neon() {
    return &kernels;
}

#else

const spac_kernels * spac_kernels_neon() {
    return nullptr;
}

#endif
