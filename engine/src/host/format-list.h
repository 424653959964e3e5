// Every format that has kernels.
#pragma once

// format in ggml, what goes through its rows, format here
#define SPAC_FOR_EACH_FORMAT(X)             \
    X(GGML_TYPE_Q8_0, dot_rows, q8_0)       \
    X(GGML_TYPE_Q4_0, dot_rows, q4_0)       \
    X(GGML_TYPE_Q4_1, dot_rows, q4_1)       \
    X(GGML_TYPE_Q5_0, dot_rows, q5_0)       \
    X(GGML_TYPE_Q5_1, dot_rows, q5_1)       \
    X(GGML_TYPE_IQ4_NL, dot_rows, iq4_nl)   \
    X(GGML_TYPE_MXFP4, dot_rows, mxfp4)     \
    X(GGML_TYPE_Q4_K, dot_rows, q4_k)       \
    X(GGML_TYPE_Q5_K, dot_rows, q5_k)       \
    X(GGML_TYPE_Q6_K, dot_rows, q6_k)       \
    X(GGML_TYPE_IQ4_XS, dot_rows, iq4_xs)   \
    X(GGML_TYPE_Q1_0, dot_rows, q1_0)       \
    X(GGML_TYPE_Q2_0, dot_rows, q2_0)       \
    X(GGML_TYPE_NVFP4, dot_rows, nvfp4)     \
    X(GGML_TYPE_Q2_K, dot_rows, q2_k)       \
    X(GGML_TYPE_Q3_K, dot_rows, q3_k)       \
    X(GGML_TYPE_TQ1_0, dot_rows, tq1_0)     \
    X(GGML_TYPE_TQ2_0, dot_rows, tq2_0)     \
    X(GGML_TYPE_IQ1_S, dot_rows, iq1_s)     \
    X(GGML_TYPE_IQ1_M, dot_rows, iq1_m)     \
    X(GGML_TYPE_IQ2_XXS, dot_rows, iq2_xxs) \
    X(GGML_TYPE_IQ2_XS, dot_rows, iq2_xs)   \
    X(GGML_TYPE_IQ2_S, dot_rows, iq2_s)     \
    X(GGML_TYPE_IQ3_XXS, dot_rows, iq3_xxs) \
    X(GGML_TYPE_IQ3_S, dot_rows, iq3_s)     \
    X(GGML_TYPE_F16, dot_floats, f16)       \
    X(GGML_TYPE_BF16, dot_floats, bf16)
