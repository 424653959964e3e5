#include "routing-log.h"

#include "activations.h"
#include "layers/reader-node.h"

#include <algorithm>
#include <cstring>

static constexpr uint16_t NOT_SEEN = UINT16_MAX;

spac_routing_log::spac_routing_log(spac_board & board) :
    board(board), ring_tokens(board.routed_tokens()), ring_experts(board.routed_experts()) {}

// The tensor that a node which will be computed reads its token ids from. Graphs have one as well where embeddings are
// their input, which are not filled then, and which no such node reads.
static ggml_tensor * find_tokens(ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        for (int s = 0; (node->flags & GGML_TENSOR_FLAG_COMPUTE) && s < GGML_MAX_SRC; s++) {
            ggml_tensor * src = node->src[s];
            if (src && src->type == GGML_TYPE_I32 && strcmp(src->name, "inp_tokens") == 0) {
                return src;
            }
        }
    }
    return nullptr;
}

// src: tokens; dst: one number, unused
void spac_routing_log::begin_with_tokens(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        ((spac_routing_log *) user_data)->begin(dst->src[0], dst->src[0]->ne[0]);
    }
}

// src: ids
void spac_routing_log::begin_without(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        ((spac_routing_log *) user_data)->begin(nullptr, dst->src[0]->ne[1]);
    }
}

void spac_routing_log::add_node(const llama_moe_hook_params & p, ggml_backend_t backend) {
    ggml_tensor * tokens = find_tokens(p.gf);
    spac_add_reader_node(p, backend, "spac_tokens", tokens ? tokens : p.ids, tokens ? begin_with_tokens : begin_without, this);
}

uint16_t * spac_routing_log::experts_of(int64_t i) const {
    const spac_board_geometry & g = board.geometry();
    return ring_experts + (first + i) % SPAC_N_ROUTED * g.n_layer * g.n_expert_used;
}

void spac_routing_log::begin(const ggml_tensor * tokens, int64_t n) {
    end();
    const spac_board_geometry & g      = board.geometry();
    const int64_t               n_rows = std::min<int64_t>(n, SPAC_N_ROUTED_MAX);

    n_tokens = n;
    first    = board.begin_rows(n_rows);
    for (int64_t i = 0; i < n_rows; i++) {
        const int64_t it = n - n_rows + i;

        ring_tokens[(first + i) % SPAC_N_ROUTED] = tokens && it < n_tokens_counted ? ((const int32_t *) tokens->data)[it] : -1;
        std::fill_n(experts_of(i), (size_t) g.n_layer * g.n_expert_used, NOT_SEEN);
    }
}

void spac_routing_log::add(int il, const ggml_tensor * ids) {
    const spac_board_geometry & g = board.geometry();
    if (ids->ne[1] != n_tokens) {
        return;
    }
    const int32_t n_expert = std::min<int32_t>(g.n_expert, NOT_SEEN);
    const int64_t n_used   = std::min<int64_t>(ids->ne[0], g.n_expert_used);
    const int64_t n_rows   = std::min<int64_t>(n_tokens, SPAC_N_ROUTED_MAX);
    for (int64_t i = 0; i < n_rows; i++) {
        uint16_t * experts = experts_of(i) + (size_t) il * g.n_expert_used;
        for (int64_t iu = 0; iu < n_used; iu++) {
            const int32_t ie = spac_id_at(ids, iu, n_tokens - n_rows + i);
            experts[iu]      = ie >= 0 && ie < n_expert ? (uint16_t) ie : NOT_SEEN;
        }
    }
}

void spac_routing_log::end() {
    if (n_tokens > 0) {
        board.end_rows();
        n_tokens = 0;
    }
}
