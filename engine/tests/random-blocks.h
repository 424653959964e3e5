// Random weights in the formats that take long to quantise to: every bit pattern, with scales of an ordinary size.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

// where the scales of a block of fp16 are, and where what is subtracted or added; -1: there is none
struct spac_scale_fields {
    int scale, minimum;
};

static inline spac_scale_fields scale_fields_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q2_K:
            return { 80, 82 };
        case GGML_TYPE_Q3_K:
            return { 108, -1 };
        case GGML_TYPE_TQ1_0:
            return { 52, -1 };
        case GGML_TYPE_TQ2_0:
            return { 64, -1 };
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_NVFP4:
            return { -1, -1 };
        default: // IQ1_S, IQ2, IQ3, Q1_0, Q2_0
            return { 0, -1 };
    }
}

static inline bool has_random_blocks(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q1_0:
        case GGML_TYPE_Q2_0:
        case GGML_TYPE_NVFP4:
        case GGML_TYPE_Q2_K:
        case GGML_TYPE_Q3_K:
        case GGML_TYPE_TQ1_0:
        case GGML_TYPE_TQ2_0:
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ3_S:
            return true;
        default:
            return false;
    }
}

// the highest 4 bits of 4 words at the end of the block
static inline void set_iq1_m_scale(uint8_t * block, uint16_t scale) {
    for (int i = 0; i < 4; i++) {
        uint8_t & high = block[48 + 2 * i + 1];
        high           = (uint8_t) ((high & 0x0f) | ((scale >> (4 * i)) & 0x0f) << 4);
    }
}

static inline std::vector<char> random_blocks(ggml_type type, int64_t n_weights, float size, std::mt19937 & rng) {
    const size_t                          block = ggml_type_size(type);
    std::vector<char>                     bytes(n_weights / ggml_blck_size(type) * block);
    std::uniform_real_distribution<float> spread(0.75f, 1.25f);
    for (char & byte : bytes) {
        byte = (char) rng();
    }
    for (size_t at = 0; at < bytes.size(); at += block) {
        const spac_scale_fields fields = scale_fields_of(type);
        const float             d      = size * 0.1f * spread(rng);
        const ggml_fp16_t       scale = ggml_fp32_to_fp16(d), minimum = ggml_fp32_to_fp16(1.5f * d);
        if (fields.scale >= 0) {
            memcpy(&bytes[at + fields.scale], &scale, sizeof(scale));
        }
        if (fields.minimum >= 0) {
            memcpy(&bytes[at + fields.minimum], &minimum, sizeof(minimum));
        }
        if (type == GGML_TYPE_IQ1_M) {
            set_iq1_m_scale((uint8_t *) &bytes[at], scale);
        }
        for (int i = 0; type == GGML_TYPE_NVFP4 && i < 4; i++) {
            bytes[at + i] = (char) (rng() % 32); // up to 2^-5 of the largest scale: subnormals too
        }
    }
    return bytes;
}
