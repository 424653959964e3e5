#include "wide-batches.h"

#include "graph/activations.h"

spac_wide_batches::spac_wide_batches(spac_board & board, const spac_layers & layers, spac_host_work & host, const spac_memory_tier * tier) :
    board(board), host(host), tier(tier) {
    for (const spac_moe_layer * layer : layers.split()) {
        nodes[layer->il] = { this, layer };
    }
}

ggml_tensor * spac_wide_batches::build(const llama_moe_hook_params & p) {
    const auto it      = nodes.find(p.il);
    const bool is_ours = tier && it != nodes.end() && spac_same_experts(*it->second.layer, p) && !p.has_lora;
    return is_ours ? spac_build_split_kernels(p, &it->second, nullptr) : nullptr;
}

void spac_wide_batches::dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor *, const ggml_tensor *, int32_t * ids_device, int32_t * ids_host) {
    const int64_t n_used = ids->ne[0], n_tokens = ids->ne[1];
    for (int64_t i = 0; i < n_used * n_tokens; i++) {
        const int32_t ie = spac_id_at(ids, i % n_used, i / n_used);
        ids_device[i]    = -1;
        ids_host[i]      = ie >= 0 && ie < layer.n_expert ? ie : -1; // else it is not computed
    }
}

void spac_wide_batches::plan_host(const spac_moe_layer & layer, const int32_t * ids_host, int64_t n_tokens, int n_threads) {
    host.in_graph->plan(layer, ids_host, n_tokens, n_threads);
}

void spac_wide_batches::compute_host(const spac_moe_layer &, const ggml_tensor * cur, float * rows) {
    host.in_graph->work({ (const char *) cur->data, cur->nb[1], cur->nb[2] }, rows);
}

void spac_wide_batches::host_done(const spac_moe_layer & layer) {
    if (layer.il == nodes.rbegin()->first) {
        tier->show(board);
    }
}
