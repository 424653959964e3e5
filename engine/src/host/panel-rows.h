// What panels of every width of vectors need: the scales of 32 weights, and 256 weights of a row. Included after the formats.
#pragma once

#include "kernels.h"

#include <string.h>

namespace {

// the scales of 32 weights: two, unless the format has one
template <typename F>
constexpr int N_SCALES = 2;

#define SPAC_ONE_SCALE(format) \
    template <>                \
    constexpr int N_SCALES<format> = 1;

SPAC_ONE_SCALE(q8_0)
SPAC_ONE_SCALE(q4_0)
SPAC_ONE_SCALE(q4_1)
SPAC_ONE_SCALE(q5_0)
SPAC_ONE_SCALE(q5_1)
SPAC_ONE_SCALE(iq4_nl)
SPAC_ONE_SCALE(mxfp4)
SPAC_ONE_SCALE(q4_k)
SPAC_ONE_SCALE(q5_k)
SPAC_ONE_SCALE(iq4_xs)

// 256 weights of a row, from column i on; what lies behind its end is zeros, which meet activations of zero
template <typename F>
SPAC_INLINE const typename F::block * block_at(const char * row, int64_t i, int64_t n_cols, typename F::block * rest, size_t ahead = SPAC_PREFETCH_BYTES) {
    typedef typename F::block block;
    constexpr int             N_BLOCKS = SPAC_BLOCK / F::N;
    const block *             b        = (const block *) row + (uint64_t) i / F::N;
    if (n_cols - i >= SPAC_BLOCK) {
        prefetch_ahead(b, N_BLOCKS * sizeof(block), ahead);
        return b;
    }
    memset((void *) rest, 0, N_BLOCKS * sizeof(block));
    memcpy((void *) rest, b, (n_cols - i) / F::N * sizeof(block));
    return rest;
}

} // namespace
