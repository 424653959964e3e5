#include "device-probe.h"

#include "base/status.h"
#include "layers/expert-ffn.h"
#include "lost-server.h"

#include "ggml-alloc.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

static constexpr int64_t N_SLOTS     = 3; // the last one is the guard that MMQ reads (slot-pool.h)
static constexpr size_t  N_NODES_MAX = 64;
static constexpr char    POISON      = 0x7f; // four of them are 3.4e38: a row that was not written shows

// Kernels of two devices round differently, and quantise the input differently; wrong ids are off by the whole row.
static constexpr double MAX_ERROR = 0.05;

using context_ptr = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using backend_ptr = std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;

// what is run: only the first matrix, since an unpatched ADD_ID aborts; then all of the FFN
enum class probe { FIRST_MATRIX,
                   FFN };

static int first_part(const spac_moe_layer & layer) {
    return layer.parts[SPAC_PART_GATE_UP] ? SPAC_PART_GATE_UP : SPAC_PART_UP;
}

// even tokens have one expert here, odd ones both, all others elsewhere; no expert twice in a token, which kernels rely on
static std::vector<int32_t> make_ids(int64_t n_used, int64_t n_tokens) {
    std::vector<int32_t> ids(n_used * n_tokens, -1);
    for (int64_t it = 0; it < n_tokens; it++) {
        int32_t * of_token = &ids[it * n_used];
        if (it % 2 == 0 || n_used > 1) {
            of_token[it % n_used] = 0;
        }
        if (it % 2 == 1 && n_used > 1) {
            of_token[(it + 1) % n_used] = 1;
        }
    }
    return ids;
}

struct probe_graph {
    ggml_context * ctx;
    ggml_tensor *  parts[SPAC_N_PARTS] = {}; // [.., .., N_SLOTS]
    ggml_tensor *  cur, *ids, *rows;
    ggml_cgraph *  gf;
};

static ggml_tensor * new_slots(ggml_context * ctx, const ggml_tensor * like, bool is_bias) {
    return is_bias ? ggml_new_tensor_2d(ctx, like->type, like->ne[0], N_SLOTS) : ggml_new_tensor_3d(ctx, like->type, like->ne[0], like->ne[1], N_SLOTS);
}

static probe_graph build(ggml_context * ctx, const spac_moe_layer & layer, int64_t n_tokens, probe what) {
    const int64_t n_used = layer.n_expert_used;
    probe_graph   g      = {};
    g.ctx                = ctx;
    g.cur                = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.n_embd, layer.weight_before_ffn ? n_used : 1, n_tokens);
    g.ids                = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used, n_tokens);
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        if (layer.parts[part] && (what == probe::FFN || part == first_part(layer))) {
            g.parts[part] = new_slots(ctx, layer.parts[part], part >= SPAC_PART_UP_B);
        }
    }
    g.rows = what == probe::FFN ? spac_build_expert_ffn({ ctx, &layer, g.parts, g.cur, g.ids, nullptr, nullptr, nullptr }) : ggml_mul_mat_id(ctx, g.parts[first_part(layer)], g.cur, g.ids);
    g.gf   = ggml_new_graph_custom(ctx, N_NODES_MAX, false);
    ggml_build_forward_expand(g.gf, g.rows);
    return g;
}

static void fill(const probe_graph & g, const spac_moe_layer & layer) {
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        const size_t bytes = layer.part_bytes(part);
        for (int64_t slot = 0; g.parts[part] && slot < N_SLOTS; slot++) {
            ggml_backend_tensor_set(g.parts[part], layer.part_data(part, (int) std::min(slot, layer.n_expert - 1)), slot * bytes, bytes);
        }
    }
    std::vector<float> x(ggml_nelements(g.cur));
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = sinf(0.7f * (float) i + 1.0f); // of no importance, but the same on both sides
    }
    ggml_backend_tensor_set(g.cur, x.data(), 0, ggml_nbytes(g.cur));
    const std::vector<int32_t> ids = make_ids(g.ids->ne[0], g.ids->ne[1]);
    ggml_backend_tensor_set(g.ids, ids.data(), 0, ggml_nbytes(g.ids));
    const std::vector<char> poison(ggml_nbytes(g.rows), POISON);
    ggml_backend_tensor_set(g.rows, poison.data(), 0, poison.size());
}

static std::string device_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(ggml_backend_get_device(backend));
}

static void require_support(ggml_backend_t backend, const probe_graph & g) {
    for (int i = 0; i < ggml_graph_n_nodes(g.gf); i++) {
        const ggml_tensor * node = ggml_graph_node(g.gf, i);
        if (!ggml_backend_supports_op(backend, node)) {
            throw spac_error(SPAC_STATUS_DEVICE, spac_format("%s does not support %s with these experts (%s): use another --device, or none",
                                                             device_name(backend).c_str(), ggml_op_desc(node),
                                                             node->src[0] ? ggml_type_name(node->src[0]->type) : "?"));
        }
    }
}

static std::vector<float> run(ggml_backend_t backend, const spac_moe_layer & layer, int64_t n_tokens, probe what) {
    const context_ptr ctx(ggml_init({ N_NODES_MAX * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_NODES_MAX, false), nullptr, true }), ggml_free);
    const probe_graph g = build(ctx.get(), layer, n_tokens, what);
    require_support(backend, g);

    const buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend), ggml_backend_buffer_free);
    if (!buffer) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("%s has no room for two experts of %.1f MiB: free memory there, or use another --device", device_name(backend).c_str(),
                                                                layer.expert_bytes() / 1048576.0));
    }
    fill(g, layer);
    if (ggml_backend_graph_compute(backend, g.gf) != GGML_STATUS_SUCCESS) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("%s failed to compute two experts: use another --device, or none", device_name(backend).c_str()));
    }
    std::vector<float> rows(ggml_nelements(g.rows));
    ggml_backend_tensor_get(g.rows, rows.data(), 0, ggml_nbytes(g.rows));
    return rows;
}

static bool are_equal(const std::vector<float> & rows, const std::vector<float> & expected, const std::vector<int32_t> & ids) {
    const size_t n    = rows.size() / ids.size();
    double       norm = 0, difference = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        if (ids[i / n] < 0 && rows[i] != 0) {
            return false;
        }
        norm += (double) expected[i] * expected[i];
        difference += ((double) rows[i] - expected[i]) * ((double) rows[i] - expected[i]);
    }
    return difference <= MAX_ERROR * MAX_ERROR * norm; // false for nan too
}

static void check(ggml_backend_t backend, ggml_backend_t cpu, const spac_moe_layer & layer, int64_t n_tokens, probe what) {
    const std::vector<int32_t> ids = make_ids(layer.n_expert_used, n_tokens);
    if (!are_equal(run(backend, layer, n_tokens, what), run(cpu, layer, n_tokens, what), ids)) {
        throw spac_error(SPAC_STATUS_DEVICE,
                         spac_format("%s computes wrongly where an expert is absent (%s, %s, %lld tokens): its backend does not know of id -1; "
                                     "use another --device, or none",
                                     device_name(backend).c_str(), what == probe::FFN ? "an expert FFN" : "MUL_MAT_ID",
                                     ggml_type_name(layer.parts[first_part(layer)]->type), (long long) n_tokens));
    }
}

// Backends that know of id -1 (patches/upstream), by the names that ggml gives them. Kernels of others, Metal's and SYCL's among
// them, read out of bounds for it, which only shows where it does harm: they are not even tried.
static constexpr const char * SKIPPING_BACKENDS[] = { "CPU", "CUDA", "ROCm", "MUSA", "Vulkan", "RPC" };

static void refuse_other_backends(ggml_backend_dev_t device) {
    const std::string name      = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    const auto        is_it     = [&](const char * skipping) { return name.rfind(skipping, 0) == 0; }; // RPC[host:port]
    const bool        can_split = std::any_of(std::begin(SKIPPING_BACKENDS), std::end(SKIPPING_BACKENDS), is_it);
    if (!can_split) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("%s is a device of ggml's backend %s, whose kernels cannot skip absent experts: use a device of "
                                                         "CUDA, ROCm, Vulkan or RPC, or --device none",
                                                         ggml_backend_dev_name(device), name.c_str()));
    }
}

// An RPC server of an unpatched llama.cpp would be ended by the first -1, and this process with it: its version comes first
// (patches/upstream/0005).
static void refuse_old_server(ggml_backend_dev_t device) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    const auto         ask = (uint32_t (*)(ggml_backend_dev_t)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_rpc_dev_server_patch");
    if (ask && ask(device) < 1) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("the RPC server of %s is not of this build: it cannot skip absent experts; start this build's "
                                                         "ggml-rpc-server there, or use another --device",
                                                         ggml_backend_dev_description(device)));
    }
}

static bool is_rpc(ggml_backend_dev_t device) {
    return std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device))).rfind("RPC", 0) == 0;
}

void spac_probe_device(ggml_backend_dev_t device, const spac_moe_layer & layer, int max_batch) {
    refuse_other_backends(device);
    refuse_old_server(device);
    if (is_rpc(device)) {
        spac_name_lost_server(ggml_backend_dev_description(device));
    }
    const backend_ptr backend(ggml_backend_dev_init(device, nullptr), ggml_backend_free);
    const backend_ptr cpu(ggml_backend_cpu_init(), ggml_backend_free);
    if (!backend || !cpu) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("device %s could not be opened: use another --device, or none", ggml_backend_dev_name(device)));
    }
    check(backend.get(), cpu.get(), layer, 2, probe::FIRST_MATRIX);
    check(backend.get(), cpu.get(), layer, 2, probe::FFN);
    check(backend.get(), cpu.get(), layer, max_batch, probe::FFN);
}

static constexpr int64_t N_USED = 2, N_EXPERT = 5, N_TOKENS = 3;

// src: ids, cur; dst: [N_USED, N_TOKENS] their sums
static void add_ids(ggml_tensor * dst, int ith, int, void * n_calls) {
    if (ith != 0) {
        return;
    }
    ++*(int *) n_calls;
    for (int64_t i = 0; i < N_USED * N_TOKENS; i++) {
        const int64_t it           = i / N_USED;
        const auto *  ids          = (const int32_t *) ((const char *) dst->src[0]->data + it * dst->src[0]->nb[1]);
        const auto *  cur          = (const float *) ((const char *) dst->src[1]->data + it * dst->src[1]->nb[1]);
        ((int32_t *) dst->data)[i] = ids[i % N_USED] + (int32_t) cur[0];
    }
}

bool spac_runs_host_functions(ggml_backend_dev_t device) {
    int               n_calls = 0;
    const context_ptr ctx(ggml_init({ N_NODES_MAX * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_NODES_MAX, false), nullptr, true }), ggml_free);
    ggml_tensor *     chosen = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, N_EXPERT, N_TOKENS);
    ggml_tensor *     args[] = { ggml_view_2d(ctx.get(), chosen, N_USED, N_TOKENS, chosen->nb[1], 0), ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 1, N_TOKENS) };
    ggml_tensor *     out    = ggml_custom_4d(ctx.get(), GGML_TYPE_I32, N_USED, N_TOKENS, 1, 1, args, 2, add_ids, 1, &n_calls);
    if (!ggml_backend_dev_supports_op(device, out)) {
        return false;
    }
    const backend_ptr backend(ggml_backend_dev_init(device, nullptr), ggml_backend_free);
    const buffer_ptr  buffer(backend ? ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()) : nullptr, ggml_backend_buffer_free);
    if (!buffer) {
        return false;
    }
    std::vector<int32_t>     ids(N_EXPERT * N_TOKENS), found(N_USED * N_TOKENS);
    const std::vector<float> cur = { 100, 200, 300 };
    std::iota(ids.begin(), ids.end(), 0);
    ggml_backend_tensor_set(chosen, ids.data(), 0, ggml_nbytes(chosen));
    ggml_backend_tensor_set(args[1], cur.data(), 0, ggml_nbytes(args[1]));
    ggml_cgraph * gf = ggml_new_graph_custom(ctx.get(), N_NODES_MAX, false);
    ggml_build_forward_expand(gf, out);
    if (ggml_backend_graph_compute(backend.get(), gf) != GGML_STATUS_SUCCESS) {
        return false;
    }
    ggml_backend_tensor_get(out, found.data(), 0, ggml_nbytes(out));
    return n_calls == 1 && found == std::vector<int32_t>{ 100, 101, 205, 206, 310, 311 };
}
