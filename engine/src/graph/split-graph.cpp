#include "split-graph.h"

#include "layers/expert-ffn.h"

#include <algorithm>
#include <cstring>
#include <vector>

static spac_split_node * node_of(void * user_data) {
    return (spac_split_node *) user_data;
}

// ---- nodes of the in-graph form

// src: ids, weights where they are wanted; dst: [n_expert_used, n_tokens, 2] device ids, host ids
static void dispatch_in_graph(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        spac_split_node * node = node_of(user_data);
        int32_t *         out  = (int32_t *) dst->data;
        node->ops->dispatch(*node->layer, dst->src[0], dst->src[1], nullptr, out, out + dst->ne[0] * dst->ne[1]);
    }
}

static void plan_device(spac_split_node * node, int64_t n_tokens, int n_threads) {
    if (node->own) {
        node->ops->plan_device(*node->layer, *node->own, n_tokens, n_threads);
    }
}

// the same, for the engine's own kernels
static void dispatch_kernels(ggml_tensor * dst, int ith, int nth, void * user_data) {
    dispatch_in_graph(dst, ith, nth, user_data);
    if (ith == 0) {
        spac_split_node * node = node_of(user_data);
        node->ops->plan_host(*node->layer, (const int32_t *) dst->data + dst->ne[0] * dst->ne[1], dst->ne[1], nth);
        plan_device(node, dst->ne[1], nth);
    }
}

// src: ids of dispatch, cur; dst: [n_embd, n_expert_used, n_tokens], rows of the host experts only
static void compute_host(ggml_tensor * dst, int, int, void * user_data) {
    spac_split_node * node = node_of(user_data);
    node->ops->compute_host(*node->layer, dst->src[1], (float *) dst->data);
}

// src: device ids, cur; dst: [n_embd, n_expert_used, n_tokens], rows of the device experts, zero elsewhere
static void compute_device(ggml_tensor * dst, int ith, int, void * user_data) {
    spac_split_node *   node = node_of(user_data);
    const ggml_tensor * ids  = dst->src[0];
    for (int64_t i = 0; ith == 0 && i < ids->ne[0] * ids->ne[1]; i++) {
        if (((const int32_t *) ids->data)[i] < 0) {
            memset((char *) dst->data + i * dst->nb[1], 0, dst->nb[1]);
        }
    }
    node->ops->compute_device(*node->layer, dst->src[1], (float *) dst->data);
}

// src: dst itself; marks the time at which the device experts were done
static void mark_device_done(ggml_tensor *, int ith, int, void * user_data) {
    if (ith == 0) {
        spac_split_node * node = node_of(user_data);
        node->ops->device_done(*node->layer);
    }
}

// src: device rows, host rows, weights or NULL, both ids; dst: [n_embd, n_tokens]
// weights and adds in stock's order; this file is built without contraction to fused multiply-adds, so that each
// product is rounded as it is by ggml_mul
static void combine_in_graph(ggml_tensor * dst, int ith, int nth, void * user_data) {
    if (ith == 0) {
        spac_split_node * node = node_of(user_data);
        node->ops->host_done(*node->layer);
    }
    const bool          has_weights = dst->src[3] != nullptr;
    const ggml_tensor * rows[2]     = { dst->src[0], dst->src[1] };
    const ggml_tensor * ids         = dst->src[2];
    const ggml_tensor * weights     = dst->src[3];

    const int64_t   n_embd = dst->ne[0], n_tokens = dst->ne[1], n_used = ids->ne[0];
    const int32_t * slots = (const int32_t *) ids->data;
    const int32_t * hosts = slots + n_used * n_tokens;

    // each thread takes tokens where there are many, else a band of columns, so that one token is divided too
    const bool    by_token = n_tokens >= 4 * nth;
    const int64_t n        = by_token ? n_tokens : n_embd;
    const int64_t band     = (n + nth - 1) / nth;
    const int64_t begin = std::min(n, band * ith), end = std::min(n, begin + band);
    const int64_t c0 = by_token ? 0 : begin, c1 = by_token ? n_embd : end;

    for (int64_t it = by_token ? begin : 0; it < (by_token ? end : n_tokens); it++) {
        float * out = (float *) ((char *) dst->data + it * dst->nb[1]);
        for (int64_t iu = 0; iu < n_used; iu++) {
            const int64_t i = it * n_used + iu;
            if (slots[i] < 0 && hosts[i] < 0) { // left out: a row of zeros
                if (iu == 0) {
                    std::fill(out + c0, out + c1, 0.0f);
                }
                continue;
            }
            const ggml_tensor * from = rows[slots[i] < 0];
            const float *       row  = (const float *) ((const char *) from->data + iu * from->nb[1] + it * from->nb[2]);
            const float         w    = has_weights ? *(const float *) ((const char *) weights->data + iu * weights->nb[1] + it * weights->nb[2]) : 1.0f;
            if (iu == 0) {
                for (int64_t c = c0; c < c1; c++) {
                    out[c] = row[c] * w;
                }
            } else {
                for (int64_t c = c0; c < c1; c++) {
                    out[c] += row[c] * w;
                }
            }
        }
    }
}

// ---- nodes of the executor form

// src: ids, cur, weights where they are wanted; dst: [n_expert_used, n_tokens] device ids
static void dispatch_executor(ggml_tensor * dst, int ith, int nth, void * user_data) {
    if (ith == 0) {
        static thread_local std::vector<int32_t> ids_host;
        ids_host.resize(ggml_nelements(dst));
        spac_split_node * node = node_of(user_data);
        node->ops->dispatch(*node->layer, dst->src[0], dst->src[2], dst->src[1], (int32_t *) dst->data, ids_host.data());
        plan_device(node, dst->ne[1], nth);
    }
}

// src: dispatch; dst: [n_embd, n_expert_used, n_tokens]
static void collect_executor(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        spac_split_node * node = node_of(user_data);
        node->ops->collect(*node->layer, (float *) dst->data, dst->ne[1] * dst->ne[2]);
    }
}

// ---- building

struct split_inputs {
    ggml_tensor * cur; // [n_embd, 1 or n_expert_used, n_tokens]
    ggml_tensor * up_s, *gate_s, *down_s;
};

static split_inputs make_inputs(const llama_moe_hook_params & p, const spac_moe_layer & layer) {
    ggml_tensor * cur = ggml_reshape_3d(p.ctx, p.cur, p.cur->ne[0], 1, p.cur->ne[1]);
    if (layer.weight_before_ffn) {
        cur = ggml_mul(p.ctx, ggml_repeat_4d(p.ctx, cur, cur->ne[0], layer.n_expert_used, cur->ne[2], 1), p.weights);
    }
    return {
        cur,
        spac_gather_scale(p.ctx, layer.up_s, p.ids),
        spac_gather_scale(p.ctx, layer.gate_s, p.ids),
        spac_gather_scale(p.ctx, layer.down_s, p.ids),
    };
}

static ggml_tensor * build_ffn(const llama_moe_hook_params & p, const spac_moe_layer & layer, ggml_tensor * const * parts,
                               const split_inputs & in, ggml_tensor * ids) {
    return spac_build_expert_ffn({ p.ctx, &layer, parts, in.cur, ids, in.up_s, in.gate_s, in.down_s });
}

static ggml_tensor * pin_to_cpu(const llama_moe_hook_params & p, ggml_tensor * t) {
    ggml_backend_sched_set_tensor_backend(p.sched, t, p.backend_cpu);
    return t;
}

// all nodes between the inputs and t: with a GPU in the context, ggml's scheduler would move those there that read host
// weights for 32 rows or more, away from their ids. A view stays where its source is.
static ggml_tensor * pin_chain_to_cpu(const llama_moe_hook_params & p, ggml_tensor * t) {
    const bool is_input = t == p.cur || t == p.weights || t == p.ids;
    if (is_input || t->op == GGML_OP_NONE || t->op == GGML_OP_CUSTOM) {
        return t;
    }
    if (!t->view_src) {
        pin_to_cpu(p, t);
    }
    for (ggml_tensor * src : t->src) {
        if (src) {
            pin_chain_to_cpu(p, src);
        }
    }
    return t;
}

struct in_graph_ids {
    ggml_tensor * both; // [n_expert_used, n_tokens, 2]
    ggml_tensor * device, *host;
};

static in_graph_ids build_dispatch(const llama_moe_hook_params & p, spac_split_node * node, ggml_custom_op_t op) {
    const int64_t n_used = node->layer->n_expert_used, n_tokens = p.cur->ne[1];

    ggml_tensor * args[] = { p.ids, p.weights };
    const int     n_args = node->ops->weights_wanted() ? 2 : 1;
    ggml_tensor * ids    = pin_to_cpu(p, ggml_custom_4d(p.ctx, GGML_TYPE_I32, n_used, n_tokens, 2, 1, args, n_args, op, 1, node));
    ggml_format_name(ids, "spac_dispatch-%d", p.il);
    return {
        ids,
        ggml_view_2d(p.ctx, ids, n_used, n_tokens, ids->nb[1], 0),
        ggml_view_2d(p.ctx, ids, n_used, n_tokens, ids->nb[1], ids->nb[2]),
    };
}

// rows of the device experts, or NULL: ggml's kernels compute them
static ggml_tensor * build_own_device(const llama_moe_hook_params & p, spac_split_node * node, const split_inputs & in, ggml_tensor * ids) {
    if (!node->own) {
        return nullptr;
    }
    ggml_tensor * args[] = { ids, in.cur };
    return pin_to_cpu(p, ggml_custom_4d(p.ctx, GGML_TYPE_F32, node->layer->n_embd, node->layer->n_expert_used, p.cur->ne[1], 1, args, 2, compute_device,
                                        GGML_N_TASKS_MAX, node));
}

static ggml_tensor * build_device(const llama_moe_hook_params & p, spac_split_node * node, const spac_slot_group & group,
                                  const split_inputs & in, const in_graph_ids & ids) {
    ggml_tensor * device = build_own_device(p, node, in, ids.device);
    device               = device ? device : pin_chain_to_cpu(p, build_ffn(p, *node->layer, group.parts, in, ids.device));
    device               = pin_to_cpu(p, ggml_custom_inplace(p.ctx, device, nullptr, 0, mark_device_done, 1, node));
    ggml_build_forward_expand(p.gf, device);
    return device;
}

static ggml_tensor * build_combine(const llama_moe_hook_params & p, spac_split_node * node, ggml_tensor * device, ggml_tensor * host,
                                   const in_graph_ids & ids) {
    const spac_moe_layer & layer = *node->layer;

    ggml_tensor * rows[] = { device, host, ids.both, p.weights };
    const int     n_args = layer.weight_before_ffn ? 3 : 4;
    ggml_tensor * out    = pin_to_cpu(p, ggml_custom_4d(p.ctx, GGML_TYPE_F32, layer.n_embd, p.cur->ne[1], 1, 1, rows, n_args, combine_in_graph,
                                                        GGML_N_TASKS_MAX, node));
    ggml_build_forward_expand(p.gf, out);
    return out;
}

ggml_tensor * spac_build_split_in_graph(const llama_moe_hook_params & p, spac_split_node * node, const spac_slot_group & group) {
    const spac_moe_layer & layer = *node->layer;
    const split_inputs     in    = make_inputs(p, layer);
    const in_graph_ids     ids   = build_dispatch(p, node, dispatch_in_graph);

    ggml_tensor * device = build_device(p, node, group, in, ids);
    ggml_tensor * host   = pin_chain_to_cpu(p, build_ffn(p, layer, layer.parts, in, ids.host));
    ggml_build_forward_expand(p.gf, host);
    return build_combine(p, node, device, host, ids);
}

ggml_tensor * spac_build_split_kernels(const llama_moe_hook_params & p, spac_split_node * node, const spac_slot_group * group) {
    const spac_moe_layer & layer = *node->layer;
    const split_inputs     in    = make_inputs(p, layer);
    const in_graph_ids     ids   = build_dispatch(p, node, dispatch_kernels);

    ggml_tensor * device = group ? build_device(p, node, *group, in, ids) : nullptr;
    ggml_tensor * args[] = { ids.both, in.cur };
    ggml_tensor * host   = pin_to_cpu(p, ggml_custom_4d(p.ctx, GGML_TYPE_F32, layer.n_embd, layer.n_expert_used, p.cur->ne[1], 1, args, 2,
                                                        compute_host, GGML_N_TASKS_MAX, node));
    ggml_format_name(host, "spac_host-%d", p.il);
    ggml_build_forward_expand(p.gf, host);
    return build_combine(p, node, device ? device : host, host, ids);
}

// the rows' weighted sum over the experts, in stock's order
static ggml_tensor * build_sum(const llama_moe_hook_params & p, const spac_moe_layer & layer, ggml_tensor * rows) {
    if (!layer.weight_before_ffn) {
        rows = ggml_mul(p.ctx, rows, p.weights);
    }
    ggml_build_forward_expand(p.gf, rows);

    ggml_tensor * sum = nullptr;
    for (int64_t iu = 0; iu < layer.n_expert_used; iu++) {
        ggml_tensor * row = ggml_view_2d(p.ctx, rows, layer.n_embd, rows->ne[2], rows->nb[2], iu * rows->nb[1]);
        sum               = sum ? ggml_add(p.ctx, sum, row) : row;
    }
    return layer.n_expert_used == 1 ? ggml_cont(p.ctx, sum) : sum;
}

static ggml_tensor * build_call(const llama_moe_hook_params & p, ggml_backend_t backend, ggml_tensor * call, const char * name) {
    ggml_backend_sched_set_tensor_backend(p.sched, call, backend);
    ggml_format_name(call, "%s-%d", name, p.il);
    return call;
}

ggml_tensor * spac_build_split_executor(const llama_moe_hook_params & p, spac_split_node * node, const spac_slot_group & group, ggml_backend_t backend,
                                        ggml_backend_t merging) {
    const spac_moe_layer & layer  = *node->layer;
    const int64_t          n_used = layer.n_expert_used, n_tokens = p.cur->ne[1];
    const split_inputs     in = make_inputs(p, layer);

    ggml_tensor * args[]     = { p.ids, in.cur, p.weights };
    const int     n_args_ids = node->ops->weights_wanted() ? 3 : 2;
    ggml_tensor * ids        = ggml_custom_4d(p.ctx, GGML_TYPE_I32, n_used, n_tokens, 1, 1, args, n_args_ids, dispatch_executor, 1, node);
    ggml_tensor * device     = build_own_device(p, node, in, build_call(p, backend, ids, "spac_dispatch"));
    if (!device) { // an emulated device's would be moved to another device of the context
        device = build_ffn(p, layer, group.parts, in, ids);
        device = ggml_backend_buffer_is_host(group.buffer) ? pin_chain_to_cpu(p, device) : device;
    }
    ggml_build_forward_expand(p.gf, device);

    // It comes after the device's nodes in the graph. In the device's stream it begins when they are done, and needs nothing
    // of them. On the CPU it depends only on dispatch, and ggml's scheduler waits for a device before it begins a part of the
    // graph that needs nothing from it. So either way the device is done when collect starts to wait, and the host's own
    // threads have worked beside it all the while.
    const int     n_args = backend == p.backend_cpu ? 1 : 0; // on the device a source would be copied, for nothing
    ggml_tensor * host   = ggml_custom_4d(p.ctx, GGML_TYPE_F32, layer.n_embd, n_used, n_tokens, 1, &ids, n_args, collect_executor, 1, node);
    ggml_build_forward_expand(p.gf, build_call(p, backend, host, "spac_collect"));

    ggml_tensor * rows = ggml_add(p.ctx, device, host);
    if (merging) {
        ggml_backend_sched_set_tensor_backend(p.sched, rows, merging);
    }
    return build_sum(p, layer, rows);
}

// ---- from weights that are all in one place

ggml_tensor * spac_build_experts(const llama_moe_hook_params & p, const spac_moe_layer & layer, ggml_tensor * const * parts, ggml_tensor * ids, bool on_cpu) {
    ggml_tensor * out = build_sum(p, layer, build_ffn(p, layer, parts, make_inputs(p, layer), ids));
    return on_cpu ? pin_chain_to_cpu(p, out) : out;
}
