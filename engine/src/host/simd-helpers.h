// What the kernels of every instruction set need; on x86-64 with F16C at least. Without linkage, so that each
// kernels-*.cpp has a copy built with its own instructions.
#pragma once

#include "blocks.h"

#include <stddef.h>

#if defined(__aarch64__)
#    include <arm_neon.h>
#else
#    include <immintrin.h>
#endif

namespace {

// n bytes of weights, `ahead` from here; the address need not be valid
SPAC_INLINE void prefetch_ahead(const void * p, size_t n, size_t ahead = SPAC_PREFETCH_BYTES) {
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch((const char *) ((uintptr_t) p + ahead + i));
    }
}

// The same for rows of quantised weights and few tokens; by_l2: spac_prefetch_by_l2()
SPAC_INLINE void prefetch_stream(const void * p, size_t n, bool by_l2) {
    if (!by_l2) {
        return prefetch_ahead(p, n);
    }
    for (size_t i = 0; i < n; i += 64) {
        __builtin_prefetch((const char *) ((uintptr_t) p + SPAC_PREFETCH_BYTES + i), 0, 2);
        __builtin_prefetch((const char *) ((uintptr_t) p + SPAC_PREFETCH_NEAR + i));
    }
}

SPAC_INLINE float half_to_float(uint16_t h) {
#if defined(__aarch64__)
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
#else
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
#endif
}

} // namespace
