#include "graph-splitter.h"

#include "base/status.h"
#include "graph/choice-again.h"
#include "host/openmp-team.h"

spac_graph_splitter::spac_graph_splitter(const spac_plan & plan, const spac_layers & layers, const spac_slot_groups & groups, const spac_host_work & host,
                                         const spac_dense_matmul * dense, spac_split_ops & ops, spac_prompt_counts & prompts, spac_untried & untried,
                                         spac_routing_log & log, spac_next_layer * next_layer, spac_wide_batches & wide,
                                         spac_reason * declined, int max_batch) :
    plan(plan), groups(groups), host(host), dense(dense), prompts(prompts), untried(untried), log(log), next_layer(next_layer), wide(wide),
    can_log(plan.has_slots || wide.has_tier()), declined(declined), max_batch(max_batch) {
    for (const spac_moe_layer * layer : layers.split()) {
        const bool is_own = host.on_device && layer->own_kernels && spac_device_is_cpu(plan.device_of(*layer));
        nodes[layer->il]  = { &ops, layer, is_own ? groups[layer->group].get() : nullptr };
    }
}

// no warm-up, which runs all experts
static bool is_plain(const llama_moe_hook_params & p) {
    return p.n_expert_used == p.n_expert_used_sum;
}

bool spac_graph_splitter::is_too_wide(const llama_moe_hook_params & p) const {
    return plan.has_slots && p.cur->ne[1] > max_batch;
}

ggml_tensor * spac_graph_splitter::build(const llama_moe_hook_params & p) {
    note_graph(p);
    if (ggml_tensor * out = build_whole(p)) {
        return out;
    }
    const bool is_split = can_split(p), is_counted = is_too_wide(p) && is_plain(p);
    if (built.wants_log && (is_split || is_counted) && !built.is_logged) {
        log.add_node(p, is_split ? backend_of_calls(p) : p.backend_cpu);
        built.is_logged = true;
    }
    built.n_split += is_split;
    return is_split ? split(p) : is_counted ? build_wide(p)
                                            : nullptr;
}

// staged; or counted, and of experts on disk or llama.cpp's
ggml_tensor * spac_graph_splitter::build_wide(const llama_moe_hook_params & p) {
    ggml_tensor * out = untried.build_prompt(p, !built.is_wide);
    built.is_wide     = true;
    if (!out) {
        out = wide.build(p);
        prompts.add_node(p);
    }
    return out;
}

// hooks see the layers of a graph from first to last
void spac_graph_splitter::note_graph(const llama_moe_hook_params & p) {
    if (p.gf != built.graph || p.il <= built.last_il) {
        built.graph     = p.gf;
        built.is_logged = false;
        built.wants_log = wants_log();
        built.n_split   = 0;
        built.is_wide   = false;
        untried.begin_graph();
    }
    built.sched   = p.sched;
    built.last_il = p.il;
}

// of batches of any width; NULL: it is not whole
ggml_tensor * spac_graph_splitter::build_whole(const llama_moe_hook_params & p) {
    const auto it      = nodes.find(p.il);
    const bool is_ours = it != nodes.end() && spac_same_experts(*it->second.layer, p);
    if (!is_ours || !is_plain(p) || p.has_lora) {
        return nullptr;
    }
    const spac_moe_layer & layer = *it->second.layer;
    return untried.build_whole(p, layer, spac_device_is_cpu(plan.device_of(layer)));
}

bool spac_graph_splitter::can_reuse() const {
    return untried.can_reuse() && built.wants_log == wants_log();
}

bool spac_graph_splitter::wants_log() const {
    return can_log && log.is_asked();
}

bool spac_graph_splitter::enter(int32_t n_tokens) {
    if (n_tokens <= 0) {
        return false; // none of the model's
    }
    untried.enter_graph(built.is_wide);
    return untried.n_whole() > 0 && built.n_split == 0 && n_tokens <= max_batch;
}

void spac_graph_splitter::wait_for_devices() const {
    if (built.sched) {
        ggml_backend_sched_synchronize(built.sched);
    }
}

bool spac_graph_splitter::can_split(const llama_moe_hook_params & p) {
    const auto it      = nodes.find(p.il);
    const bool is_ours = it != nodes.end() && spac_same_experts(*it->second.layer, p);
    if (!is_ours || is_too_wide(p) || !is_plain(p)) {
        return false;
    }
    snprintf(declined[p.il].text, sizeof(spac_reason::text), "%s", p.has_lora ? SPAC_DECLINED_BY_LORA : "");
    return !p.has_lora;
}

// a context has one backend of each device
ggml_backend_t spac_graph_splitter::backend_of_device(const llama_moe_hook_params & p) const {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(p.sched); i++) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(p.sched, i);
        if (ggml_backend_get_device(backend) == plan.device_of(*nodes.at(p.il).layer)) {
            return backend;
        }
    }
    return nullptr;
}

ggml_backend_t spac_graph_splitter::backend_of_calls(const llama_moe_hook_params & p) const {
    ggml_backend_t device = plan.host_mode == SPAC_HOST_IN_STREAM ? backend_of_device(p) : nullptr;
    return device ? device : p.backend_cpu;
}

ggml_tensor * spac_graph_splitter::split(llama_moe_hook_params p) {
    spac_split_node * node = &nodes.at(p.il);
    if (node->ops->choice_wanted() && !spac_choose_again(p, node, backend_of_calls(p))) {
        as_chosen.insert(p.il);
    }
    if (next_layer) {
        next_layer->add_node(p, backend_of_calls(p)); // before dispatch: it works beside this layer's experts
    }
    if (!plan.has_slots) {
        return spac_build_split_kernels(p, node, nullptr);
    }
    const spac_slot_group & group = *groups[node->layer->group];
    if (plan.has_executor()) {
        // After a node of the CPU, ggml's scheduler leaves it to the next device, where the next layer is on another one: all
        // rows of the experts would go there instead of their sum.
        ggml_backend_t merging = plan.devices.size() > 1 ? backend_of_device(p) : nullptr;
        return spac_build_split_executor(p, node, group, backend_of_calls(p), merging);
    }
    return node->layer->own_kernels ? spac_build_split_kernels(p, node, &group) : spac_build_split_in_graph(p, node, group);
}

int32_t spac_graph_splitter::n_threads_of(ggml_cgraph * graph, int32_t n_tokens) {
    if (dense && n_tokens > 0) {
        dense->mark(graph);
    }
    if (built.is_wide && n_tokens > max_batch) {
        untried.begin_prompt(n_tokens, built.n_split > 0);
    }
    const bool is_split = is_split_by_executor(n_tokens);
    if (is_split && !last_was_split && host.has_ggml_worker() && !plan.device_is_cpu()) {
        spac_end_openmp_team();
    }
    last_was_split = is_split;
    return is_split ? 1 : 0; // the context's other threads would spin in ggml's barrier while collect waits
}

bool spac_graph_splitter::is_split_by_executor(int32_t n_tokens) const {
    // of a prompt's graph only the last layer may be split: only few of its tokens get there
    const bool is_wide = n_tokens <= 0 || n_tokens > max_batch;
    return plan.has_executor() && !is_wide && built.n_split > 0;
}
