// AVX2 with FMA and F16C. Built with these instructions: nothing in here may be inline elsewhere.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#    include "kernels-256.h"

static const spac_kernels kernels = { "avx2", quantise, find_dot, swish, find_panel, &attention, 0, quantise_i16 };

const spac_kernels * spac_kernels_avx2() {
    return &kernels;
}

#else

const spac_kernels * spac_kernels_avx2() {
    return nullptr;
}

#endif
