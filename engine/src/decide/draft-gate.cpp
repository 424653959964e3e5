#include "draft-gate.h"

#include "base/average.h"
#include "base/clock.h"
#include "base/status.h"
#include "layers/reader-node.h"

#include <algorithm>
#include <limits>
#include <memory>

static constexpr double WEIGHT = 0.2; // of the latest drafting in averages

spac_draft_gate::spac_draft_gate(llama_context * draft, spac_board & board, const spac_device_caches & cache, const std::vector<const spac_moe_layer *> & layers,
                                 int n_layer, int n_slots, int max_batch, spac_memory_tier * tier, const spac_gate_limits & limits) :
    hook(draft), cache(cache), tier(tier), stats(board.ahead()[SPAC_AHEAD_DRAFT_GATE]), routers(layers), max_batch(max_batch), limits(limits), n_copies(routers.layers().size(), 0),
    n_absent(routers.layers().size()) {
    llama_moe_hook h = {};
    h.user_data      = this;
    h.build          = [](void * gate, const llama_moe_hook_params * p) -> ggml_tensor * {
        ((spac_draft_gate *) gate)->note_layer(*p);
        return nullptr;
    };
    hook.set(h); // which shows all layers
    const int n_layer_draft = llama_model_n_layer(llama_get_model(draft));
    for (size_t i = 0; i < routers.layers().size(); i++) {
        const int il = routers.layers()[i]->il * n_layer_draft / n_layer;
        check_reads(il, *routers.layers()[i]);
        nodes[il].gate = this;
        nodes[il].indices.push_back(i);
    }
    times.n_layer_draft = n_layer_draft;
    times.n_slots       = n_slots;
    times.per_layer     = (double) n_layer_draft / n_layer;
    hook.set(make_hook());
}

spac_draft_gate::~spac_draft_gate() {
    hook.remove();
}

llama_moe_hook spac_draft_gate::make_hook() {
    llama_moe_hook h = {};
    h.user_data      = this;
    h.free           = [](void * gate) { ((spac_draft_gate *) gate)->hook.forget_context(); };
    h.build          = [](void * gate, const llama_moe_hook_params * p) -> ggml_tensor * {
        ((spac_draft_gate *) gate)->add_node(*p);
        return nullptr;
    };
    h.n_threads = [](void * gate, ggml_cgraph *, const llama_ubatch *) { return ((spac_draft_gate *) gate)->home.is_this() ? 0 : -1; };
    return h;
}

// a MoE layer's router, if it has one beside a dense FFN or shared experts
void spac_draft_gate::note_layer(const llama_moe_hook_params & p) {
    if (p.ids) {
        const spac_router router = spac_find_router(p.ids, p.down ? p.down->ne[2] : 0);
        sources[p.il]            = { router.weight ? router.input->ne[0] : 0, false };
    } else {
        sources.insert({
            p.il, { p.cur->ne[0], true }
        });
    }
}

void spac_draft_gate::check_reads(int il, const spac_moe_layer & layer) const {
    const auto    it     = sources.find(il);
    const int64_t wanted = routers.n_embd(layer.il), width = it == sources.end() ? 0 : it->second.width;
    if (width != wanted) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("draft-gate needs a draft model as wide as the target: in its layer %d %lld values can be read, where the "
                                                                   "target's layer %d has %lld; predict without draft-gate, or draft with another model",
                                                                   il, (long long) width, layer.il, (long long) wanted));
    }
}

// ---- on the thread of the draft's graphs

// src: input of a router or FFN; dst: one number, unused
void spac_draft_gate::run_node(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0 && dst->src[0]->ne[1] > 0) { // a last layer may run for no token
        const node & n = *(node *) user_data;
        n.gate->see(n, dst->src[0]);
    }
}

// a wide batch is a prompt
void spac_draft_gate::add_node(const llama_moe_hook_params & p) {
    const auto it = nodes.find(p.il);
    if (it == nodes.end() || p.cur->ne[1] > max_batch || sources.at(p.il).is_dense != !p.ids) {
        return;
    }
    if (p.ids) {
        spac_add_router_node(p, p.backend_cpu, "spac_draft_gate", run_node, &it->second);
    } else {
        spac_add_reader_node(p, p.backend_cpu, "spac_draft_gate", p.cur, run_node, &it->second);
    }
}

// only the last token: those before it were verified already, and the draft model is catching up
void spac_draft_gate::see(const node & n, const ggml_tensor * input) {
    const uint64_t target_forward = cache.forward_of(routers.layers()[0]->il);
    if (target_forward != forward) {
        begin_drafting(target_forward);
    }
    note_time(n);
    for (size_t index : n.indices) {
        const auto j = std::make_shared<job>();
        j->index     = index;
        j->forward   = forward;
        j->may_copy  = index < cutoff;
        j->input     = spac_router_rows(input, input->ne[1] - 1, 1);
        thread.submit([this, j] { work_off(*j); });
    }
}

void spac_draft_gate::note_time(const node & n) {
    const uint64_t now = spac_now_us();
    if (&n == &nodes.begin()->second) {
        if (nodes.size() == 1 && n_forwards > 0) { // from one token to the next: all that a forward does, as nothing less is seen
            spac_blend(times.layer_us, (double) (now - begin_us) / times.n_layer_draft, WEIGHT);
        }
        n_forwards++;
        begin_us = now;
    } else if (&n == &std::prev(nodes.end())->second) {
        // of all layers between the first that is read and the last
        spac_blend(times.layer_us, (double) (now - begin_us) / (std::prev(nodes.end())->first - nodes.begin()->first), WEIGHT);
    }
}

void spac_draft_gate::begin_drafting(uint64_t target_forward) {
    if (n_forwards > 0) {
        spac_blend(times.n_draft, (double) n_forwards, WEIGHT);
        for (size_t i = 0; i < n_copies.size(); i++) {
            spac_blend(n_copies[i], n_absent[i].exchange(0), WEIGHT);
        }
    }
    times.copy_us = 0;
    for (const spac_moe_layer * layer : routers.layers()) {
        times.copy_us = std::max(times.copy_us, cache.copy_us(layer->il));
    }
    cutoff             = limits.cutoff < 0 ? spac_cutoff_layer(n_copies, times) : std::min((size_t) limits.cutoff, n_copies.size());
    stats.cutoff_layer = cutoff;
    forward            = target_forward;
    n_forwards         = 0;
}

// ---- on its own thread

void spac_draft_gate::work_off(const job & j) {
    const uint32_t il = routers.layers()[j.index]->il;
    stats.n_inputs++;
    if (cache.has_run(il, j.forward)) {
        stats.n_late++;
        return;
    }
    const uint64_t             begin   = spac_now_us();
    const std::vector<int32_t> experts = routers.choose(il, j.input.data(), 1, limits.n_critical);
    stats.us += spac_now_us() - begin;
    // from disk to memory, which is far; the scheduler takes to the device what is worth it
    n_absent[j.index] += cache.expect({ SPAC_AHEAD_DRAFT_GATE, il, j.forward, std::numeric_limits<double>::infinity(), j.may_copy && !tier }, experts);
    if (tier) {
        stats.n_queued += tier->expect((int) il, experts);
    }
}
