#include "kernels.h"

#include "blocks.h"

#include <cstdlib>
#include <cstring>

// ---- registration

#if defined(__x86_64__)

// the processor and the system have what it was compiled with (engine/CMakeLists.txt)
static bool can_run_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2");
}

static bool can_run_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#else

static bool can_run_avx512() {
    return false;
}

static bool can_run_avx2() {
    return false;
}

#endif

struct instruction_set {
    const spac_kernels * (*kernels)(); // NULL: not compiled in
    bool (*can_run)();
};

// the best first
static const instruction_set INSTRUCTION_SETS[] = {
    { spac_kernels_avx512, can_run_avx512 },
    { spac_kernels_avx2,   can_run_avx2   },
};

const spac_kernels * spac_kernels_best() {
    const char * limit = getenv("PYSPAC_KERNELS");
    const bool   skip  = limit && strcmp(limit, "avx2") == 0;
    for (const instruction_set & set : INSTRUCTION_SETS) {
        const bool is_skipped = skip && set.kernels == spac_kernels_avx512;
        if (!is_skipped && set.kernels() && set.can_run()) {
            return set.kernels();
        }
    }
    return nullptr;
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
