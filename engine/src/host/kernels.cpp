#include "kernels.h"

#include "blocks.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)

// compiled in, and the processor and the system have what it uses
static bool has_avx512() {
    return spac_kernels_avx512() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("bmi2");
}

static bool has_avx2() {
    return spac_kernels_avx2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#else

static bool has_avx512() {
    return false;
}

static bool has_avx2() {
    return false;
}

#endif

const spac_kernels * spac_kernels_best() {
    const char * limit      = getenv("PYSPAC_KERNELS");
    const bool   is_limited = limit && strcmp(limit, "avx2") == 0;
    if (has_avx512() && !is_limited) {
        return spac_kernels_avx512();
    }
    return has_avx2() ? spac_kernels_avx2() : nullptr;
}

spac_act_form spac_act_form_of(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ? SPAC_ACT_F32 : SPAC_ACT_Q8;
}

size_t spac_act_bytes(spac_act_form form, int64_t n_cols) {
    return form == SPAC_ACT_Q8 ? (n_cols + SPAC_BLOCK - 1) / SPAC_BLOCK * sizeof(spac_act_q8) : (n_cols + 15) / 16 * 16 * sizeof(float);
}

void spac_prepare_act(const spac_kernels & kernels, spac_act_form form, const float * x, int64_t n_cols, char * act) {
    if (form == SPAC_ACT_Q8) {
        kernels.quantise(x, n_cols, act);
        return;
    }
    memset(act, 0, spac_act_bytes(form, n_cols)); // for the padding
    memcpy(act, x, n_cols * sizeof(float));
}
