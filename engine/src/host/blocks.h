// The weight formats as they lie in a GGUF file, and the layout of quantised activations. No functions: this is
// included where the compiler may use any instruction.
#pragma once

#include <stdint.h>

// the compiler would rather pass vectors through memory
#define SPAC_INLINE inline __attribute__((always_inline))

// how far ahead of the weights in use memory is asked for: beyond the 4 KiB page at whose end the processor's own prefetching
// stops
static constexpr int SPAC_PREFETCH_BYTES = 8192;
static constexpr int SPAC_PREFETCH_NEAR  = 2048; // into L1, where 8192 is only into L2

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

struct spac_block_q1_0 { // 128 weights
    uint16_t d;
    uint8_t  q[16]; // a bit each, the first weight's the lowest: 1 is d, 0 is -d
};

struct spac_block_q2_0 { // 64 weights
    uint16_t d;
    uint8_t  q[16]; // 2 bits each, the first weight's the lowest; minus 1
};

struct spac_block_nvfp4 { // 64 weights
    uint8_t e[4];         // scales of 16 weights each: UE4M3
    uint8_t q[32];        // 8 bytes per scale; low nibbles: weights 0-7; high: 8-15
};

struct spac_block_q2_k {
    uint8_t  scales[16]; // of 16 weights each; low nibble: scale; high: min
    uint8_t  q[64];      // 32 bytes: bits 2i are weights 32i-32i+31 of a half
    uint16_t d, dmin;
};

struct spac_block_q3_k {
    uint8_t  qh[32];     // bit i: high bit of sub-block i of 32; minus 4
    uint8_t  q[64];      // as in Q2_K
    uint8_t  scales[12]; // 16 of 6 bits; minus 32
    uint16_t d;
};

struct spac_block_tq1_0 {
    uint8_t  q[48]; // 5 weights each, as fractions of 256 in base 3; minus 1
    uint8_t  qh[4]; // 4 weights each
    uint16_t d;
};

struct spac_block_tq2_0 {
    uint8_t  q[64]; // as in Q2_K; minus 1
    uint16_t d;
};

// The IQ types below: an index stands for 8 weights (IQ3: 4) of a grid (iq-grids.h), with a sign bit for each of 8. Where 7
// bits are kept, the eighth makes the number of minus signs even.

struct spac_block_iq2_xxs {
    uint16_t d;
    uint8_t  q[64]; // per 32 weights 4 indices, then 32 bits: 4 times 7 signs, scale
};

struct spac_block_iq2_xs {
    uint16_t d;
    uint16_t q[32];     // index of 9 bits, 7 signs
    uint8_t  scales[8]; // two of 16 weights each
};

struct spac_block_iq2_s {
    uint16_t d;
    uint8_t  q[32]; // low bytes of the indices
    uint8_t  signs[32];
    uint8_t  qh[8]; // 2 high bits each
    uint8_t  scales[8];
};

struct spac_block_iq3_xxs {
    uint16_t d;
    uint8_t  q[64];
    uint8_t  signs[32]; // per 32 weights 32 bits: 4 times 7 signs, scale
};

struct spac_block_iq3_s {
    uint16_t d;
    uint8_t  q[64]; // low bytes of the indices
    uint8_t  qh[8]; // a high bit each
    uint8_t  signs[32];
    uint8_t  scales[4]; // two of 32 weights each
};

struct spac_block_iq1_s {
    uint16_t d;
    uint8_t  q[32]; // low bytes of the indices
    uint16_t qh[8]; // per 32 weights 4 times 3 high bits, scale of 3 bits, sign of the shift
};

struct spac_block_iq1_m {
    uint8_t  q[32];     // low bytes of the indices
    uint8_t  qh[16];    // 3 high bits and the sign of the shift, per 8 weights
    uint16_t scales[4]; // four scales of 3 bits, of 16 weights each; in the highest 4 bits a quarter of d
};

static_assert(sizeof(spac_block_q8_0) == 34 && sizeof(spac_block_q4_0) == 18 && sizeof(spac_block_mxfp4) == 17, "padding");
static_assert(sizeof(spac_block_q4_1) == 20 && sizeof(spac_block_q5_0) == 22 && sizeof(spac_block_q5_1) == 24, "padding");
static_assert(sizeof(spac_block_q4_k) == 144 && sizeof(spac_block_q5_k) == 176, "padding");
static_assert(sizeof(spac_block_q6_k) == 210 && sizeof(spac_block_iq4_xs) == 136, "padding");

static_assert(sizeof(spac_block_q1_0) == 18 && sizeof(spac_block_q2_0) == 18 && sizeof(spac_block_nvfp4) == 36, "padding");
static_assert(sizeof(spac_block_q2_k) == 84 && sizeof(spac_block_q3_k) == 110, "padding");
static_assert(sizeof(spac_block_tq1_0) == 54 && sizeof(spac_block_tq2_0) == 66, "padding");
static_assert(sizeof(spac_block_iq2_xxs) == 66 && sizeof(spac_block_iq2_xs) == 74 && sizeof(spac_block_iq2_s) == 82, "padding");
static_assert(sizeof(spac_block_iq3_xxs) == 98 && sizeof(spac_block_iq3_s) == 110, "padding");
static_assert(sizeof(spac_block_iq1_s) == 50 && sizeof(spac_block_iq1_m) == 56, "padding");

// 256 activations. The 16 groups of 16 and the bytes in them are permuted so that each 32-bit lane of an accumulator
// collects one group, and needs one scale (see kernels-*.cpp).
struct alignas(64) spac_act_q8 {
    int8_t q[SPAC_BLOCK];
    float  d[16]; // scale of each group; two by two the same, since scales are per 32
    float  s[16]; // d times the sum of the group: what an offset of 1 in the weights adds
};

static_assert(sizeof(spac_act_q8) == 384, "padding");

// 256 activations in 13 bits, of each four the first and third before the others, for panels of 16-bit weights (panel-words.h)
struct alignas(64) spac_act_i16 {
    int16_t q[SPAC_BLOCK];
    float   d;
};

static_assert(sizeof(spac_act_i16) == 576, "padding");
