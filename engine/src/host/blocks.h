// The weight formats as they lie in a GGUF file, and the layout of quantised activations. No functions: this is
// included where the compiler may use any instruction.
#pragma once

#include <stdint.h>

// the compiler would rather pass vectors through memory
#define SPAC_INLINE inline __attribute__((always_inline))

// how far ahead of the weights in use memory is asked for: a quarter faster than the processor's own prefetching,
// which stops at the end of a 4 KiB page
static constexpr int SPAC_PREFETCH_BYTES = 8192;

static constexpr int SPAC_BLOCK = 256; // weights that are unpacked at once: one superblock, or 8 blocks of 32

struct spac_block_q8_0 {
    uint16_t d; // fp16
    int8_t   q[32];
};

struct spac_block_q4_0 {
    uint16_t d;
    uint8_t  q[16]; // low nibbles: weights 0-15; high: 16-31; minus 8
};

struct spac_block_q4_1 {
    uint16_t d, m; // scale, and what is added
    uint8_t  q[16];
};

struct spac_block_q5_0 {
    uint16_t d;
    uint8_t  qh[4]; // high bits of the 32 weights; minus 16
    uint8_t  q[16];
};

struct spac_block_q5_1 {
    uint16_t d, m;
    uint8_t  qh[4];
    uint8_t  q[16];
};

typedef spac_block_q4_0 spac_block_iq4_nl; // nibbles are indices into a table

struct spac_block_mxfp4 {
    uint8_t e; // E8M0
    uint8_t q[16];
};

struct spac_block_q4_k {
    uint16_t d, dmin;
    uint8_t  scales[12]; // 8 scales and 8 mins of 6 bits
    uint8_t  q[128];     // 32 bytes: low nibbles are one sub-block of 32, high nibbles the next
};

struct spac_block_q5_k {
    uint16_t d, dmin;
    uint8_t  scales[12];
    uint8_t  qh[32]; // bit i: high bit of sub-block i
    uint8_t  q[128];
};

struct spac_block_q6_k {
    uint8_t  ql[128];
    uint8_t  qh[64];
    int8_t   scales[16];
    uint16_t d;
};

struct spac_block_iq4_xs {
    uint16_t d;
    uint16_t scales_h;
    uint8_t  scales_l[4];
    uint8_t  q[128];
};

static_assert(sizeof(spac_block_q8_0) == 34 && sizeof(spac_block_q4_0) == 18 && sizeof(spac_block_mxfp4) == 17, "padding");
static_assert(sizeof(spac_block_q4_1) == 20 && sizeof(spac_block_q5_0) == 22 && sizeof(spac_block_q5_1) == 24, "padding");
static_assert(sizeof(spac_block_q4_k) == 144 && sizeof(spac_block_q5_k) == 176, "padding");
static_assert(sizeof(spac_block_q6_k) == 210 && sizeof(spac_block_iq4_xs) == 136, "padding");

// 256 activations. The 16 groups of 16 and the bytes in them are permuted so that each 32-bit lane of an accumulator
// collects one group, and needs one scale (see kernels-*.cpp).
struct alignas(64) spac_act_q8 {
    int8_t q[SPAC_BLOCK];
    float  d[16]; // scale of each group; two by two the same, since scales are per 32
    float  s[16]; // d times the sum of the group: what an offset of 1 in the weights adds
};

static_assert(sizeof(spac_act_q8) == 384, "padding");
