#include "next-layer.h"

#include "base/average.h"
#include "base/clock.h"

#include <memory>

static constexpr int64_t MAX_TOKENS_TIER = 32;  // a wider batch reads the next layer as a whole
static constexpr double  TIME_WEIGHT     = 0.1; // of the latest forward in a layer's time

spac_next_layer::spac_next_layer(spac_board & board, const spac_device_caches & cache, const std::vector<const spac_moe_layer *> & layers, int distance,
                                 spac_memory_tier * tier) :
    cache(cache), stats(board.ahead()[SPAC_AHEAD_NEXT_LAYER]), tier(tier), routers(layers), distance(distance), layer_us(routers.layers().size(), 0) {
    for (size_t i = 0; i < routers.layers().size(); i++) {
        nodes[routers.layers()[i]->il] = { this, i };
    }
}

// ---- on the graph's thread

// src: router input; dst: one number, unused
void spac_next_layer::run_node(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        const node & n = *(node *) user_data;
        n.next_layer->see(n.index, dst->src[0]);
    }
}

void spac_next_layer::add_node(const llama_moe_hook_params & p, ggml_backend_t backend) {
    const auto it = nodes.find(p.il);
    if (it != nodes.end()) {
        spac_add_router_node(p, backend, "spac_next_layer", run_node, &it->second);
    }
}

void spac_next_layer::see(size_t index, const ggml_tensor * input) {
    const uint64_t now = spac_now_us();
    note_time(index, now);
    if (index + distance >= routers.layers().size() || (tier && input->ne[1] > MAX_TOKENS_TIER)) {
        return;
    }
    const uint32_t il = routers.layers()[index]->il;
    const auto     j  = std::make_shared<job>();
    j->il             = routers.layers()[index + distance]->il;
    j->forward        = cache.forward_of(il); // of the layer that is about to run
    j->due_us         = due_us(index, now);
    j->n_tokens       = input->ne[1];
    j->input          = spac_router_rows(input, 0, input->ne[1]);
    thread.submit([this, j] { work_off(*j); });
}

void spac_next_layer::note_time(size_t index, uint64_t now) {
    if (last_index != SIZE_MAX && index == last_index + 1) {
        spac_blend(layer_us[last_index], now - last_us, TIME_WEIGHT);
    }
    last_index = index;
    last_us    = now;
}

// `now` where one of the times on the way is not known yet
uint64_t spac_next_layer::due_us(size_t index, uint64_t now) const {
    double us = 0;
    for (size_t i = index; i < index + distance; i++) {
        if (layer_us[i] == 0) {
            return now;
        }
        us += layer_us[i];
    }
    return now + (uint64_t) us;
}

// ---- on its own thread

void spac_next_layer::work_off(const job & j) {
    stats.n_inputs++;
    if (cache.has_run(j.il, j.forward)) {
        stats.n_late++;
        return;
    }
    const uint64_t             begin   = spac_now_us();
    const std::vector<int32_t> experts = routers.choose(j.il, j.input.data(), j.n_tokens);
    const uint64_t             now     = spac_now_us();
    stats.us += now - begin;
    cache.expect({ SPAC_AHEAD_NEXT_LAYER, j.il, j.forward, j.due_us > now ? (double) (j.due_us - now) : 0, !tier }, experts);
    if (tier) {
        stats.n_queued += tier->expect(j.il, experts);
    }
}
