// The kernels of one instruction set as a table: how rows and activations are gone through, and which format gets which
// kernel. A kernels-*.cpp includes this after its own part, which is, without linkage:
//
//   vec, zero(), sum_of(vec)            a vector of floats
//   q8_0, q4_0 ... f16, bf16            the formats of format-list.h; a new one is a line there, its block in blocks.h, its
//                                       unpacking in each set, and a line in engine/tests/kernel-types.h; panels: panel-rows.h,
//                                       panel-512.h and panel-amx.h list what holds for which
//   add_block<format, n_tokens>()       256 weights times activations, added to n_tokens sums
//   dot_floats<format, n_tokens>()      rows of f16 and bf16; the arguments are those of dot_rows()
//   quantise_256(), swish()
//
// Nothing in here has linkage either: each has a copy built with its own instructions. A new set has its flags in
// engine/CMakeLists.txt, its name in kernels.h, what it needs of the processor in kernels.cpp.
#pragma once

#include "blocks.h"
#include "format-list.h"
#include "kernels.h"

#include <string.h>

namespace {

// ---- quantised rows

// BY_L2 is known to the compiler: asked for each block it took 2 to 4 % of the time on a Zen 5 (Q8_0 in its third cache)
template <typename F, int NT, bool BY_L2>
void dot_rows_by(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, float * const * out) {
    typedef typename F::block block;
    constexpr int             N_BLOCKS = SPAC_BLOCK / F::N;

    const spac_act_q8 * a[NT];
    for (int t = 0; t < NT; t++) {
        a[t] = (const spac_act_q8 *) acts[t];
    }
    const int64_t n_whole = n_cols / SPAC_BLOCK, n_rest = n_cols % SPAC_BLOCK / F::N;
    const int64_t n_rows_beyond = ((N_BLOCKS - n_rest) * sizeof(block) + row_bytes - 1) / row_bytes; // that a whole block at a row's end reaches into

    for (int64_t ir = 0; ir < n_rows; ir++) {
        const block * row = (const block *) (rows + ir * row_bytes);
        vec           sums[NT];
        for (vec & sum : sums) {
            sum = zero();
        }
        for (int64_t ib = 0; ib < n_whole; ib++) {
            prefetch_stream(row + ib * N_BLOCKS, N_BLOCKS * sizeof(block), BY_L2);
            add_block<F, NT>(row + ib * N_BLOCKS, a, ib, sums);
        }
        if (n_rest && n_rows - ir > n_rows_beyond) { // the next rows meet activations of zero: they must be finite, as in a sound file
            add_block<F, NT>(row + n_whole * N_BLOCKS, a, n_whole, sums);
        } else if (n_rest) {
            block rest[N_BLOCKS] = {};
            memcpy((void *) rest, row + n_whole * N_BLOCKS, n_rest * sizeof(block));
            add_block<F, NT>(rest, a, n_whole, sums);
        }
        for (int t = 0; t < NT; t++) {
            out[t][ir] = sum_of(sums[t]);
        }
    }
}

template <typename F, int NT>
void dot_rows(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, float * const * out) {
#ifdef __AVX512F__ // by way of L2 was not measured without
    if (spac_prefetch_by_l2()) {
        return dot_rows_by<F, NT, true>(rows, row_bytes, n_rows, n_cols, acts, out);
    }
#endif
    dot_rows_by<F, NT, false>(rows, row_bytes, n_rows, n_cols, acts, out);
}

// ---- one function per format, for 1 to 8 tokens

#ifdef SPAC_FEW_WIDTHS // of a sanitizer's build, in which each function takes the compiler seconds

#    define SPAC_DEFINE_DOT(type, kernel, format)                                                                                     \
        void dot_##format(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, int n_acts, \
                          float * const * out) {                                                                                      \
            if (n_acts == SPAC_DOT_TOKENS) {                                                                                          \
                return kernel<format, SPAC_DOT_TOKENS>(rows, row_bytes, n_rows, n_cols, acts, out);                                   \
            }                                                                                                                         \
            for (int t = 0; t < n_acts; t++) {                                                                                        \
                kernel<format, 1>(rows, row_bytes, n_rows, n_cols, acts + t, out + t);                                                \
            }                                                                                                                         \
        }

#else

#    define SPAC_DEFINE_DOT(type, kernel, format)                                                                                     \
        void dot_##format(const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols, const char * const * acts, int n_acts, \
                          float * const * out) {                                                                                      \
            switch (n_acts) {                                                                                                         \
                case 1:                                                                                                               \
                    return kernel<format, 1>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
                case 2:                                                                                                               \
                    return kernel<format, 2>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
                case 3:                                                                                                               \
                    return kernel<format, 3>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
                case 4:                                                                                                               \
                    return kernel<format, 4>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
                case 5:                                                                                                               \
                    return kernel<format, 5>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
                case 6:                                                                                                               \
                    return kernel<format, 6>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
                case 7:                                                                                                               \
                    return kernel<format, 7>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
                default:                                                                                                              \
                    return kernel<format, 8>(rows, row_bytes, n_rows, n_cols, acts, out);                                             \
            }                                                                                                                         \
        }

#endif

SPAC_FOR_EACH_FORMAT(SPAC_DEFINE_DOT)

spac_dot find_dot(ggml_type type) {
    switch (type) {
#define SPAC_CASE(type, kernel, format) \
    case type:                          \
        return dot_##format;
        SPAC_FOR_EACH_FORMAT(SPAC_CASE)
#undef SPAC_CASE
        default:
            return nullptr;
    }
}

// ---- activations

void quantise(const float * x, int64_t n_cols, char * act) {
    spac_act_q8 * to = (spac_act_q8 *) act;
    int64_t       i  = 0;
    for (; i + SPAC_BLOCK <= n_cols; i += SPAC_BLOCK) {
        quantise_256(x + i, to++);
    }
    if (i < n_cols) {
        float rest[SPAC_BLOCK] = {};
        memcpy(rest, x + i, (n_cols - i) * sizeof(float));
        quantise_256(rest, to);
    }
}

} // namespace
