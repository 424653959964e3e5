#include "router.h"

// from ids to the matmul, of any architecture
static constexpr int N_NODES_MAX = 40;

static bool is_weight(const ggml_tensor * t) {
    return t && t->op == GGML_OP_NONE && t->buffer && !(t->flags & GGML_TENSOR_FLAG_INPUT);
}

static bool is_bias(const ggml_tensor * t, int64_t n_expert) {
    return is_weight(t) && t->type == GGML_TYPE_F32 && t->ne[0] == n_expert && ggml_nelements(t) == n_expert;
}

static bool is_router(const ggml_tensor * t, int64_t n_expert) {
    return t->op == GGML_OP_MUL_MAT && is_weight(t->src[0]) && t->src[0]->ne[1] == n_expert && ggml_is_matrix(t->src[0]) &&
           t->src[1]->type == GGML_TYPE_F32 && ggml_is_matrix(t->src[1]);
}

// walks from the ids up: what is met before the activation came after it
static void note_gating(spac_router & router, const ggml_tensor * t) {
    if (t->op == GGML_OP_SOFT_MAX) {
        router.gating = SPAC_GATING_SOFTMAX;
    } else if (t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == GGML_UNARY_OP_SIGMOID) {
        router.gating = SPAC_GATING_SIGMOID;
    } else if (t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == GGML_UNARY_OP_SOFTPLUS) {
        router.gating = SPAC_GATING_SQRT_SOFTPLUS;
    }
}

static void note_bias(spac_router & router, ggml_tensor * t, int64_t n_expert) {
    if (t->op != GGML_OP_ADD || !is_bias(t->src[1], n_expert)) {
        return;
    }
    (router.gating == SPAC_GATING_MONOTONE ? router.selection_bias : router.bias) = t->src[1];
}

spac_router spac_find_router(const ggml_tensor * ids, int64_t n_expert) {
    spac_router         router;
    const ggml_tensor * t = ids;
    for (int i = 0; t && i < N_NODES_MAX; i++) {
        if (is_router(t, n_expert)) {
            router.weight = t->src[0];
            router.input  = t->src[1];
            if (router.gating == SPAC_GATING_MONOTONE) { // only the weights are made of probabilities
                router.bias           = router.selection_bias;
                router.selection_bias = nullptr;
            } else if (!router.selection_bias) {
                router.gating = SPAC_GATING_MONOTONE;
            }
            return router;
        }
        note_gating(router, t);
        note_bias(router, (ggml_tensor *) t, n_expert);
        t = t->src[0];
    }
    return {};
}
