#include "choice-again.h"

#include <cstring>

static constexpr int N_NODES_MAX = 12; // from ids to weights, of any architecture

// what the ids are the largest of, if its order is that of the logits: these; else NULL
static ggml_tensor * logits_behind(const ggml_tensor * ids) {
    const ggml_tensor * sorted = ids->view_src ? ids->view_src : ids;
    ggml_tensor *       scores = sorted->op == GGML_OP_ARGSORT || sorted->op == GGML_OP_TOP_K ? sorted->src[0] : nullptr;
    if (scores && (scores->op == GGML_OP_SOFT_MAX || (scores->op == GGML_OP_UNARY && ggml_get_unary_op(scores) == GGML_UNARY_OP_SIGMOID))) {
        scores = scores->src[0];
    }
    const bool has_bias = scores && scores->op == GGML_OP_ADD;
    return scores && (has_bias ? scores->src[0] : scores)->op == GGML_OP_MUL_MAT ? scores : nullptr;
}

static bool is_plain(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_RESHAPE:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_CLAMP:
        case GGML_OP_DIV:
        case GGML_OP_SCALE:
        case GGML_OP_SOFT_MAX:
        case GGML_OP_UNARY:
            return t->op == GGML_OP_RESHAPE || !t->view_src;
        default:
            return false;
    }
}

// t with other ids; NULL: it has a node of which this does not know how it is made
static ggml_tensor * again(ggml_context * ctx, ggml_tensor * t, const ggml_tensor * ids, ggml_tensor * new_ids, int depth) {
    if (t->op == GGML_OP_GET_ROWS && t->src[1] == ids) {
        return ggml_get_rows(ctx, t->src[0], new_ids);
    }
    if (depth == N_NODES_MAX || !is_plain(t)) {
        return nullptr;
    }
    ggml_tensor * src[2] = {};
    for (int s = 0; s < 2 && t->src[s]; s++) {
        src[s] = again(ctx, t->src[s], ids, new_ids, depth + 1);
        if (!src[s]) {
            return nullptr;
        }
    }
    if (!src[0] || t->src[2]) {
        return nullptr;
    }
    if (t->op == GGML_OP_RESHAPE) {
        return ggml_reshape_4d(ctx, src[0], t->ne[0], t->ne[1], t->ne[2], t->ne[3]);
    }
    ggml_tensor * made = ggml_dup_tensor(ctx, t);
    made->op           = t->op;
    memcpy(made->op_params, t->op_params, sizeof(t->op_params));
    made->src[0] = src[0];
    made->src[1] = src[1];
    return made;
}

// src: logits, ids; dst: [n_expert_used, n_tokens]
static void run_node(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        const auto * node = (const spac_split_node *) user_data;
        node->ops->choose_again(*node->layer, dst->src[0], dst->src[1], (int32_t *) dst->data);
    }
}

bool spac_choose_again(llama_moe_hook_params & p, spac_split_node * node, ggml_backend_t backend) {
    ggml_tensor * logits = logits_behind(p.ids);
    if (!logits || logits->type != GGML_TYPE_F32 || logits->ne[0] != node->layer->n_expert || logits->ne[1] != p.ids->ne[1] || !ggml_is_matrix(logits)) {
        return false;
    }
    ggml_tensor * src[]   = { logits, p.ids };
    ggml_tensor * ids     = ggml_custom_4d(p.ctx, GGML_TYPE_I32, p.ids->ne[0], p.ids->ne[1], 1, 1, src, 2, run_node, 1, node);
    ggml_tensor * weights = again(p.ctx, p.weights, p.ids, ids, 0);
    if (!weights) {
        return false;
    }
    ggml_backend_sched_set_tensor_backend(p.sched, ids, backend);
    ggml_format_name(ids, "spac_choice-%d", p.il);
    ggml_build_forward_expand(p.gf, weights);
    p.ids     = ids;
    p.weights = weights;
    return true;
}
