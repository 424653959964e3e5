// AVX2 with AVX-VNNI: Intel's processors for desktops and laptops since 2021. Built with these instructions: nothing in here may be inline elsewhere.
#include "kernels.h"

#if defined(__AVXVNNI__) && defined(__FMA__) && defined(__F16C__)

#    include "kernels-256.h"

static const spac_kernels kernels = { "avxvnni", quantise, find_dot, swish, find_panel, &attention };

const spac_kernels * spac_kernels_avxvnni() {
    return &kernels;
}

#else

const spac_kernels * spac_kernels_avxvnni() {
    return nullptr;
}

#endif
