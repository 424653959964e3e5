// Which kernel multiplies a type, the engine's own or ggml's, and in which form it takes the activations.
#include "blocks.h"
#include "ggml-cpu.h"
#include "kernels.h"

#include <cstring>

// ---- ggml's own

static bool has_ggml_dot(ggml_type type) {
    const ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
    return traits->vec_dot && (traits->vec_dot_type == GGML_TYPE_Q8_0 || traits->vec_dot_type == GGML_TYPE_Q8_K || traits->vec_dot_type == GGML_TYPE_F32);
}

static ggml_type type_of(spac_act_form form) {
    return form == SPAC_ACT_GGML_Q8_0 ? GGML_TYPE_Q8_0 : GGML_TYPE_Q8_K;
}

bool spac_has_dot(const spac_kernels & kernels, ggml_type type) {
    return kernels.dot(type) || has_ggml_dot(type);
}

void spac_dot_rows(const spac_kernels & kernels, ggml_type type, const char * rows, size_t row_bytes, int64_t n_rows, int64_t n_cols,
                   const char * const * acts, int n_acts, float * const * out) {
    if (const spac_dot dot = kernels.dot(type)) {
        dot(rows, row_bytes, n_rows, n_cols, acts, n_acts, out);
        return;
    }
    const ggml_vec_dot_t dot = ggml_get_type_traits_cpu(type)->vec_dot;
    for (int64_t ir = 0; ir < n_rows; ir++) {
        for (int t = 0; t < n_acts; t++) {
            dot((int) n_cols, out[t] + ir, 0, rows + ir * row_bytes, 0, acts[t], 0, 1);
        }
    }
}

const spac_panel * spac_panel_for(const spac_kernels & kernels, ggml_type type, int64_t n_acts) {
    const spac_panel * panel = kernels.panel ? kernels.panel(type) : nullptr;
    return panel && n_acts >= panel->n_tokens_min ? panel : nullptr;
}

// ---- activations

spac_act_form spac_act_form_of(const spac_kernels & kernels, ggml_type type) {
    if (kernels.dot(type)) {
        return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ? SPAC_ACT_F32 : SPAC_ACT_Q8;
    }
    const ggml_type of = ggml_get_type_traits_cpu(type)->vec_dot_type;
    return of == GGML_TYPE_F32 ? SPAC_ACT_F32 : of == GGML_TYPE_Q8_0 ? SPAC_ACT_GGML_Q8_0
                                                                     : SPAC_ACT_GGML_Q8_K;
}

size_t spac_act_bytes(spac_act_form form, int64_t n_cols) {
    switch (form) {
        case SPAC_ACT_Q8:
            return (n_cols + SPAC_BLOCK - 1) / SPAC_BLOCK * sizeof(spac_act_q8);
        case SPAC_ACT_F32:
            return GGML_PAD(n_cols, 16) * sizeof(float);
        case SPAC_ACT_I16:
            return (n_cols + SPAC_BLOCK - 1) / SPAC_BLOCK * sizeof(spac_act_i16);
        case SPAC_ACT_BF16:
            return GGML_PAD(n_cols, 32) * sizeof(ggml_bf16_t);
        default:
            return GGML_PAD(ggml_row_size(type_of(form), n_cols), 64);
    }
}

static void prepare_one(const spac_kernels & kernels, spac_act_form form, const float * x, int64_t n_cols, char * act) {
    switch (form) {
        case SPAC_ACT_Q8:
            kernels.quantise(x, n_cols, act);
            break;
        case SPAC_ACT_F32:
            memset(act, 0, spac_act_bytes(form, n_cols)); // for the padding
            memcpy(act, x, n_cols * sizeof(float));
            break;
        case SPAC_ACT_I16:
            kernels.quantise_i16(x, n_cols, act);
            break;
        default:
            ggml_get_type_traits_cpu(type_of(form))->from_float(x, act, n_cols);
    }
}

void spac_prepare_acts(const spac_kernels & kernels, spac_act_form form, const float * const * x, int n, int64_t n_cols, char * acts) {
    if (form == SPAC_ACT_BF16) {
        kernels.interleave_bf16(x, n, n_cols, acts);
    } else {
        prepare_one(kernels, form, x[0], n_cols, acts);
    }
}
