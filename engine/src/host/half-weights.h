// Half of 256 weights in vectors of 256 bits, and what unpacking them needs.
#pragma once

#include "blocks.h"

#include <immintrin.h>

namespace {

// Vector i holds the 32 weights of sub-block i, its first 16 in the lower lane.
struct half_weights {
    __m256i q[4];
    __m256  scale, offset; // weight = scale * q - offset; lane m: of group 2 (m % 4) + m / 4 of 16
};

SPAC_INLINE __m256i load(const void * p) {
    return _mm256_loadu_si256((const __m256i *) p);
}

// 4 floats, one per block of 32, to the lanes
SPAC_INLINE __m256 spread_blocks(__m128 x) {
    return _mm256_set_m128(x, x);
}

SPAC_INLINE __m256i low_nibbles(__m256i x) {
    return _mm256_and_si256(x, _mm256_set1_epi8(0xF));
}

SPAC_INLINE __m256i high_nibbles(__m256i x) {
    return low_nibbles(_mm256_srli_epi16(x, 4));
}

} // namespace
