// The grids of the IQ types as the kernels want them: bytes that are never negative, and what to subtract from them.
#pragma once

#include <stdint.h>

struct spac_iq_grids {
    // 8 weights each, plus SPAC_IQ2_OFFSET
    uint64_t iq2_xxs[256];
    uint64_t iq2_xs[512];
    uint64_t iq2_s[1024];

    // 4 weights each: halves of them, plus SPAC_IQ3_XXS_OFFSET or 7.5
    uint32_t iq3_xxs[256];
    uint32_t iq3_s[512];

    // 8 weights each, plus 1; last, as what is before may be read 12 bytes too far
    uint64_t iq1[2048];
};

static constexpr int SPAC_IQ2_OFFSET = 43, SPAC_IQ3_XXS_OFFSET = 31; // the largest of them

extern const spac_iq_grids spac_grids;
