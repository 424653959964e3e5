#include "prompt-counts.h"

#include "layers/reader-node.h"

#include <map>

spac_prompt_counts::spac_prompt_counts(spac_board & board, const spac_device_caches & cache, const spac_layers & layers, spac_routing_log & log, bool fills) :
    board(board), cache(cache), log(log), fills(fills), activations(board.geometry().n_expert) {
    std::map<int, int> n_layers_of; // by layout group
    for (const spac_moe_layer * layer : layers.split()) {
        n_layers_of[layer->group]++;
    }
    for (const spac_moe_layer * layer : layers.split()) {
        // an equal share for each layer of the group: the first layers of a prompt use nearly all of their experts, and
        // would leave nothing to those behind them
        const size_t n_layers = n_layers_of[layer->group];
        nodes[layer->il]      = { this, layer, (board.group_slots()[layer->il] + n_layers - 1) / n_layers };
    }
}

// src: ids; dst: one number, unused
void spac_prompt_counts::run_node(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        const node & n = *(node *) user_data;
        n.counts->count(*n.layer, dst->src[0]);
        n.counts->fill(*n.layer, dst->src[0]->ne[1]);
    }
}

void spac_prompt_counts::add_node(const llama_moe_hook_params & p) {
    const auto it = nodes.find(p.il);
    if (it == nodes.end() || !spac_same_experts(*it->second.layer, p)) {
        return;
    }
    spac_add_reader_node(p, p.backend_cpu, "spac_count", p.ids, run_node, &it->second);
}

const spac_activations & spac_prompt_counts::count(const spac_moe_layer & layer, const ggml_tensor * ids) {
    if (layer.il <= last_il || last_il < 0) {
        board.counters()->n_prompt_tokens += ids->ne[1];
    }
    last_il = layer.il == nodes.rbegin()->first ? -1 : layer.il;
    activations.count(ids, layer.n_expert, board.prompt_counts() + (size_t) layer.il * board.geometry().n_expert);
    log.add(layer.il, ids);
    if (on_layer) {
        on_layer(layer.il);
    }
    if (last_il < 0) {
        log.end();
        board.publish();
    }
    return activations;
}

void spac_prompt_counts::fill(const spac_moe_layer & layer, size_t n_tokens) {
    if (fills) {
        cache.fill(layer.il, activations.experts.data(), activations.n_rows.data(), activations.n_distinct(), n_tokens,
                   nodes.at(layer.il).n_held_max);
    }
}
