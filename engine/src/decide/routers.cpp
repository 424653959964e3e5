#include "routers.h"

#include "base/best-first.h"
#include "base/status.h"
#include "layers/reader-node.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

static constexpr size_t N_NODES = 4;

void spac_add_router_node(const llama_moe_hook_params & p, ggml_backend_t backend, const char * name, ggml_custom_op_t op, void * user_data) {
    const spac_router router = spac_find_router(p.ids, p.down ? p.down->ne[2] : 0);
    if (router.weight) {
        spac_add_reader_node(p, backend, name, router.input, op, user_data);
    }
}

std::vector<float> spac_router_rows(const ggml_tensor * input, int64_t first, int64_t n) {
    std::vector<float> rows(input->ne[0] * n);
    for (int64_t i = 0; i < n; i++) {
        memcpy(&rows[i * input->ne[0]], (const char *) input->data + (first + i) * input->nb[1], input->ne[0] * sizeof(float));
    }
    return rows;
}

spac_routers::spac_routers(const std::vector<const spac_moe_layer *> & layers) :
    arena(N_NODES * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_NODES, false)) {
    ggml_threadpool_params params = ggml_threadpool_params_default(1);
    threadpool.reset(ggml_threadpool_new(&params));
    for (const spac_moe_layer * layer : layers) {
        if (add(*layer)) {
            list.push_back(layer);
        }
    }
    if (list.empty()) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "no router of this model can be asked early: none of its split layers has one that is a "
                                                       "matrix over the layer's input; predict without next-layer and draft-gate");
    }
}

static std::vector<float> read_vector(const ggml_tensor * t) {
    std::vector<float> values(t ? ggml_nelements(t) : 0);
    if (t) {
        ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
    }
    return values;
}

// weights that the CPU has repacked cannot be read back
static bool is_readable(const ggml_tensor * t) {
    const ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(t->buffer));
    return ggml_backend_buffer_is_host(t->buffer) || (device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU);
}

bool spac_routers::add(const spac_moe_layer & layer) {
    const spac_router & r = layer.router;
    if (!r.weight || !is_readable(r.weight)) {
        return false;
    }
    entries[layer.il] = { on_host(r.weight), read_vector(r.bias), read_vector(r.selection_bias), r.gating, layer.n_expert_used };
    return true;
}

const ggml_tensor * spac_routers::on_host(const ggml_tensor * weight) {
    if (ggml_backend_buffer_is_host(weight->buffer)) {
        return weight;
    }
    copies.emplace_back(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor *               copy   = ggml_dup_tensor(copies.back().get(), weight);
    const ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(copies.back().get(), ggml_backend_cpu_buffer_type());
    if (!buffer) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("no memory for the router %s: %zu bytes", weight->name, ggml_nbytes(weight)));
    }
    buffers.emplace_back(buffer);
    ggml_backend_tensor_get(weight, copy->data, 0, ggml_nbytes(weight));
    return copy;
}

// by llama.cpp's own kernels, whatever the type of the weight
void spac_routers::compute_logits(const ggml_tensor & weight, const float * input, int64_t n_tokens) {
    ggml_context * ctx = ggml_init({ arena.size(), arena.data(), true });
    ggml_tensor *  w   = ggml_new_tensor_2d(ctx, weight.type, weight.ne[0], weight.ne[1]);
    ggml_tensor *  x   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, weight.ne[0], n_tokens);
    ggml_tensor *  y   = ggml_mul_mat(ctx, w, x);
    ggml_cgraph *  gf  = ggml_new_graph_custom(ctx, N_NODES, false);
    logits.resize(ggml_nelements(y));
    w->data = weight.data;
    x->data = (void *) input;
    y->data = logits.data();
    ggml_build_forward_expand(gf, y);

    ggml_cplan plan = ggml_graph_plan(gf, 1, threadpool.get());
    work.resize(std::max(work.size(), plan.work_size));
    plan.work_data = work.data();
    ggml_graph_compute(gf, &plan);
    ggml_free(ctx);
}

// the values by which experts are selected, of one token
void spac_routers::set_scores(const entry & e, const float * token_logits) {
    const size_t n = e.weight->ne[1];
    scores.assign(token_logits, token_logits + n);
    for (size_t i = 0; i < e.bias.size(); i++) {
        scores[i] += e.bias[i];
    }
    const float largest = *std::max_element(scores.begin(), scores.end());
    double      sum     = 0;
    for (float & s : scores) {
        switch (e.gating) {
            case SPAC_GATING_MONOTONE:
                break;
            case SPAC_GATING_SOFTMAX:
                s = std::exp(s - largest);
                sum += s;
                break;
            case SPAC_GATING_SIGMOID:
                s = 1 / (1 + std::exp(-s));
                break;
            case SPAC_GATING_SQRT_SOFTPLUS:
                s = std::sqrt(s > 20 ? s : std::log1p(std::exp(s)));
                break;
        }
    }
    for (size_t i = 0; i < n; i++) {
        scores[i] = (e.gating == SPAC_GATING_SOFTMAX ? (float) (scores[i] / sum) : scores[i]) + (e.selection_bias.empty() ? 0 : e.selection_bias[i]);
        if (std::isnan(scores[i])) {
            scores[i] = -std::numeric_limits<float>::infinity(); // else there is no order
        }
    }
}

std::vector<int32_t> spac_routers::choose(int il, const float * input, int64_t n_tokens, int64_t n_most) {
    const entry & e        = entries.at(il);
    const int64_t n_expert = e.weight->ne[1];
    const int64_t n_used   = n_most > 0 ? std::min(n_most, e.n_expert_used) : e.n_expert_used;
    compute_logits(*e.weight, input, n_tokens);

    n_rows.assign(n_expert, 0);
    chosen.resize(n_used * n_tokens);
    for (int64_t it = 0; it < n_tokens; it++) {
        set_scores(e, &logits[it * n_expert]);
        spac_best_first(scores, n_used, order);
        for (int64_t iu = 0; iu < n_used; iu++) {
            chosen[iu * n_tokens + it] = order[iu]; // by rank first
            n_rows[order[iu]]++;
        }
    }
    std::vector<int32_t> experts;
    std::vector<bool>    is_listed(n_expert);
    for (int32_t ie : chosen) {
        if (!is_listed[ie]) {
            is_listed[ie] = true;
            experts.push_back(ie);
        }
    }
    std::stable_sort(experts.begin(), experts.end(), [&](int32_t a, int32_t b) { return n_rows[a] > n_rows[b]; });
    return experts;
}
