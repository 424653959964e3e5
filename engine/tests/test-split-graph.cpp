// A split layer against the stock graph, bit by bit, with placements that change while graphs run. No model needed:
// the layer is built as llama.cpp builds it, on a scheduler of its own. Run under TSan too.
#include "cache/prefetch-worker.h"
#include "cache/slot-copy.h"
#include "check.h"
#include "graph/split-graph.h"
#include "host/ggml-worker.h"
#include "host/host-experts.h"

#include "llama-graph.h" // llm_ffn_op_type

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

static constexpr int N_EMBD = 64, N_FF = 96, N_EXPERT = 12, N_USED = 3, N_SLOTS = 5, MAX_BATCH = 9;

static void fill(ggml_tensor * t, std::mt19937 & rng) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float>                    values(ggml_nelements(t));
    for (float & v : values) {
        v = uniform(rng);
    }
    std::vector<char> bytes(ggml_nbytes(t));
    ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

// the weights of one layer, in host memory
struct layer_fixture {
    spac_moe_layer        layer;
    ggml_context *        ctx = ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true });
    ggml_backend_buffer_t buffer;

    explicit layer_fixture(bool weight_before_ffn) {
        layer.il                      = 0;
        layer.n_embd                  = N_EMBD;
        layer.n_expert                = N_EXPERT;
        layer.n_expert_used           = N_USED;
        layer.op                      = LLM_FFN_SILU;
        layer.group                   = 0;
        layer.weight_before_ffn       = weight_before_ffn;
        layer.parts[SPAC_PART_UP]     = ggml_new_tensor_3d(ctx, GGML_TYPE_Q8_0, N_EMBD, N_FF, N_EXPERT);
        layer.parts[SPAC_PART_GATE]   = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, N_EMBD, N_FF, N_EXPERT);
        layer.parts[SPAC_PART_DOWN]   = ggml_new_tensor_3d(ctx, GGML_TYPE_Q4_0, N_FF, N_EMBD, N_EXPERT);
        layer.parts[SPAC_PART_UP_B]   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_FF, N_EXPERT);
        layer.parts[SPAC_PART_DOWN_B] = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_EMBD, N_EXPERT);
        layer.up_s                    = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, N_EXPERT);
        buffer                        = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());

        std::mt19937 rng(3);
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            fill(t, rng);
        }
    }

    ~layer_fixture() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

// the part of an engine that the nodes call
struct mini_engine : spac_split_ops {
    std::vector<uint8_t>                  residency = std::vector<uint8_t>(N_EXPERT);
    spac_counters                         counters  = {};
    spac_expert_cache                     cache;
    spac_slot_group                       group;
    spac_slot_copy                        slot_copy;
    std::unique_ptr<spac_ggml_worker>     executor;
    std::unique_ptr<spac_prefetch_worker> worker;

    mini_engine(const spac_moe_layer & layer, bool with_executor) :
        cache({
                  { 0, N_EXPERT, layer.expert_bytes() }
    },
              { N_SLOTS }, N_EXPERT, true, { residency.data(), &counters }),
        slot_copy(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        group.like    = &layer;
        group.n_slots = N_SLOTS;
        group.allocate(ggml_backend_cpu_buffer_type());
        if (with_executor) {
            executor = std::make_unique<spac_ggml_worker>(std::vector<const spac_moe_layer *>{ &layer }, MAX_BATCH, 2, std::vector<int>());
        }
        worker = std::make_unique<spac_prefetch_worker>(cache, [&](const spac_load & load) { slot_copy.copy(layer, layer.parts_of(load.ie), group, load.slot, load.is_staged); return true; }, 0);
    }

    void dispatch(const spac_moe_layer & layer, const ggml_tensor * ids, const ggml_tensor *, const ggml_tensor * cur, int32_t * ids_device, int32_t * ids_host) override {
        cache.unpin_all();
        const int32_t * chosen = (const int32_t *) ids->data;
        const int64_t   n      = ggml_nelements(ids);

        std::vector<int32_t> distinct(chosen, chosen + n);
        std::sort(distinct.begin(), distinct.end());
        distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
        std::vector<int32_t>  slots(distinct.size());
        std::vector<uint32_t> n_rows(distinct.size(), 1);
        cache.pin(0, distinct.data(), n_rows.data(), distinct.size(), slots.data());

        for (int64_t i = 0; i < n; i++) {
            const int32_t slot = slots[std::lower_bound(distinct.begin(), distinct.end(), chosen[i]) - distinct.begin()];
            ids_device[i]      = slot;
            ids_host[i]        = slot < 0 ? chosen[i] : -1;
        }
        if (executor) {
            executor->submit(&layer, cur, ids_host, chosen, (int) ids->ne[1]);
        }
    }

    void collect(const spac_moe_layer & layer, float * rows, size_t n_rows) override {
        uint64_t us;
        memcpy(rows, executor->wait(us), n_rows * layer.n_embd * sizeof(float));
    }

    void device_done(const spac_moe_layer &) override {}
    void host_done(const spac_moe_layer &) override {}
};

// all experts on the host, with the engine's own kernels
struct kernels_engine : spac_split_ops {
    spac_host_experts experts;

    explicit kernels_engine(const spac_kernels & kernels) :
        experts(kernels) {}

    void dispatch(const spac_moe_layer &, const ggml_tensor * ids, const ggml_tensor *, const ggml_tensor *, int32_t * ids_device, int32_t * ids_host) override {
        std::fill(ids_device, ids_device + ggml_nelements(ids), -1);
        memcpy(ids_host, ids->data, ggml_nbytes(ids));
    }

    void plan_host(const spac_moe_layer & layer, const int32_t * ids_host, int64_t n_tokens, int n_threads) override {
        experts.plan(layer, ids_host, n_tokens, n_threads);
    }

    void compute_host(const spac_moe_layer &, const ggml_tensor * cur, float * rows) override {
        experts.work({ (const char *) cur->data, cur->nb[1], cur->nb[2] }, rows);
    }

    void collect(const spac_moe_layer &, float *, size_t) override {}
    void device_done(const spac_moe_layer &) override {}
    void host_done(const spac_moe_layer &) override {}
};

// what llama.cpp builds: scale, bias, activation, bias, weights and the sum over the experts
static ggml_tensor * build_stock(const llama_moe_hook_params & p, const spac_moe_layer & layer) {
    ggml_context * ctx = p.ctx;
    ggml_tensor *  cur = ggml_reshape_3d(ctx, p.cur, N_EMBD, 1, p.cur->ne[1]);
    if (layer.weight_before_ffn) {
        cur = ggml_mul(ctx, ggml_repeat_4d(ctx, cur, N_EMBD, N_USED, cur->ne[2], 1), p.weights);
    }
    ggml_tensor * s = ggml_repeat_4d(ctx, ggml_reshape_3d(ctx, layer.up_s, 1, N_EXPERT, 1), 1, N_EXPERT, p.cur->ne[1], 1);

    ggml_tensor * up   = ggml_mul(ctx, ggml_mul_mat_id(ctx, layer.parts[SPAC_PART_UP], cur, p.ids), ggml_get_rows(ctx, s, p.ids));
    up                 = ggml_add_id(ctx, up, layer.parts[SPAC_PART_UP_B], p.ids);
    ggml_tensor * gate = ggml_mul_mat_id(ctx, layer.parts[SPAC_PART_GATE], cur, p.ids);
    ggml_tensor * rows = ggml_mul_mat_id(ctx, layer.parts[SPAC_PART_DOWN], ggml_swiglu_split(ctx, gate, up), p.ids);
    rows               = ggml_add_id(ctx, rows, layer.parts[SPAC_PART_DOWN_B], p.ids);
    if (!layer.weight_before_ffn) {
        rows = ggml_mul(ctx, rows, p.weights);
    }
    ggml_tensor * sum = ggml_view_2d(ctx, rows, N_EMBD, rows->ne[2], rows->nb[2], 0);
    for (int iu = 1; iu < N_USED; iu++) {
        sum = ggml_add(ctx, sum, ggml_view_2d(ctx, rows, N_EMBD, rows->ne[2], rows->nb[2], iu * rows->nb[1]));
    }
    return sum;
}

struct forward_input {
    std::vector<float>   cur, weights;
    std::vector<int32_t> ids;
    int                  n_tokens;
};

static forward_input random_input(int n_tokens, std::mt19937 & rng) {
    forward_input in;
    in.n_tokens = n_tokens;
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int i = 0; i < n_tokens * N_EMBD; i++) {
        in.cur.push_back(uniform(rng));
    }
    for (int it = 0; it < n_tokens; it++) {
        std::vector<int32_t> all(N_EXPERT);
        for (int ie = 0; ie < N_EXPERT; ie++) {
            all[ie] = ie;
        }
        std::shuffle(all.begin(), all.end(), rng);
        in.ids.insert(in.ids.end(), all.begin(), all.begin() + N_USED);
        for (int iu = 0; iu < N_USED; iu++) {
            in.weights.push_back(0.1f + uniform(rng) * 0.05f);
        }
    }
    return in;
}

// A GPU beside the CPU: the CPU again, but as another device with buffers of its own, to which ggml's scheduler moves what
// reads host weights, as it does for CUDA from 32 rows on.
struct fake_gpu {
    ggml_backend_t           real = ggml_backend_cpu_init();
    ggml_backend_buffer_type buft;
    ggml_backend_device      device;
    ggml_backend             backend;

    fake_gpu() :
        buft(*ggml_backend_cpu_buffer_type()), device(*ggml_backend_get_device(real)), backend(*real) {
        buft.iface.get_name        = [](ggml_backend_buffer_type_t) { return "FAKE0"; };
        buft.iface.is_host         = [](ggml_backend_buffer_type_t) { return false; };
        buft.device                = &device;
        device.iface.get_type      = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
        device.iface.supports_op   = [](ggml_backend_dev_t, const ggml_tensor * op) { return op->op != GGML_OP_CUSTOM; };
        device.iface.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t t) { return t->iface.is_host && !t->iface.is_host(t); };
        device.iface.offload_op    = [](ggml_backend_dev_t, const ggml_tensor * op) { return ggml_nrows(op) >= 32; };
        backend.device             = &device;
    }

    ~fake_gpu() { ggml_backend_free(real); }
};

// the nodes of a layer; what they call is the node's
typedef std::function<ggml_tensor *(const llama_moe_hook_params &, spac_split_node *)> layer_builder;

// gpu: NULL, or beside the CPU in the scheduler; n_nodes: NULL, or counts the nodes computed, after each of which all of
// ggml's threads wait for each other (ggml_graph_compute_thread in ggml-cpu.c, which asks there whether to abort)
static std::vector<float> run_built(const spac_moe_layer & layer, spac_split_ops * ops, const layer_builder & build, const forward_input & in, int n_threads,
                                    fake_gpu * gpu, int * n_nodes) {
    ggml_context * ctx = ggml_init({ 128 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, n_threads);
    if (n_nodes) {
        ggml_backend_cpu_set_abort_callback(cpu, [](void * n) { ++*(int *) n; return false; }, n_nodes);
    }
    ggml_backend_t             backends[] = { gpu ? &gpu->backend : cpu, cpu };
    ggml_backend_buffer_type_t bufts[]    = { gpu ? &gpu->buft : ggml_backend_cpu_buffer_type(), ggml_backend_cpu_buffer_type() };
    ggml_backend_sched_t       sched      = ggml_backend_sched_new(backends, bufts, gpu ? 2 : 1, 256, false, gpu != nullptr);

    llama_moe_hook_params p = {};
    p.ctx                   = ctx;
    p.gf                    = ggml_new_graph(ctx);
    p.sched                 = sched;
    p.backend_cpu           = cpu;
    p.cur                   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_EMBD, in.n_tokens);
    p.ids                   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, N_USED, in.n_tokens);
    p.weights               = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, N_USED, in.n_tokens);
    for (ggml_tensor * t : { p.cur, p.ids, p.weights }) {
        ggml_set_input(t);
    }

    spac_split_node node = { ops, &layer };
    ggml_tensor *   out  = build(p, &node);
    ggml_set_output(out);
    ggml_build_forward_expand(p.gf, out);
    CHECK(ggml_backend_sched_alloc_graph(sched, p.gf));
    ggml_backend_tensor_set(p.cur, in.cur.data(), 0, ggml_nbytes(p.cur));
    ggml_backend_tensor_set(p.ids, in.ids.data(), 0, ggml_nbytes(p.ids));
    ggml_backend_tensor_set(p.weights, in.weights.data(), 0, ggml_nbytes(p.weights));
    CHECK(ggml_backend_sched_graph_compute(sched, p.gf) == GGML_STATUS_SUCCESS);

    std::vector<float> result(N_EMBD * in.n_tokens);
    ggml_backend_tensor_get(out, result.data(), 0, result.size() * sizeof(float));
    ggml_backend_sched_free(sched);
    ggml_backend_free(cpu);
    ggml_free(ctx);
    return result;
}

// engine: NULL for the stock graph
static std::vector<float> run(const spac_moe_layer & layer, mini_engine * engine, const forward_input & in, int n_threads, fake_gpu * gpu = nullptr) {
    const auto build = [&](const llama_moe_hook_params & p, spac_split_node * node) {
        return !engine            ? build_stock(p, layer)
               : engine->executor ? spac_build_split_executor(p, node, engine->group, p.backend_cpu, nullptr)
                                  : spac_build_split_in_graph(p, node, engine->group);
    };
    return run_built(layer, engine, build, in, n_threads, gpu, nullptr);
}

static void test(bool with_executor, bool weight_before_ffn) {
    layer_fixture f(weight_before_ffn);
    mini_engine   engine(f.layer, with_executor);
    std::mt19937  rng(5);

    for (int i = 0; i < 60; i++) {
        std::vector<uint8_t>  utility(N_EXPERT), tau = { (uint8_t) (1 + rng() % 3) };
        std::vector<uint32_t> loads(N_EXPERT);
        for (int ie = 0; ie < N_EXPERT; ie++) {
            utility[ie] = rng() % 5;
            loads[ie]   = rng() % N_EXPERT;
        }
        engine.cache.apply(utility.data(), tau.data(), loads.data(), loads.size(), UINT64_MAX); // copies run on meanwhile

        const int           n_threads = 1 + i % 3;
        const forward_input in        = random_input(1 + rng() % MAX_BATCH, rng);
        CHECK(run(f.layer, &engine, in, n_threads) == run(f.layer, nullptr, in, n_threads));
    }
    CHECK(engine.counters.n_hit > 0 && engine.counters.n_miss > 0 && engine.counters.n_evictions > 0);
    engine.worker.reset();
}

// host experts and the CPU's slots stay on the CPU however many rows there are
static void test_beside_a_gpu(bool weight_before_ffn) {
    layer_fixture f(weight_before_ffn);
    ggml_backend_buffer_set_usage(f.buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    mini_engine           engine(f.layer, false);
    std::vector<uint8_t>  utility(N_EXPERT, 1), tau = { 1 };
    std::vector<uint32_t> loads = { 0, 1, 2 };
    engine.cache.apply(utility.data(), tau.data(), loads.data(), loads.size(), UINT64_MAX);
    CHECK(engine.cache.wait_idle(5000));

    fake_gpu     gpu;
    std::mt19937 rng(7);
    for (const int n_tokens : { 1, 11, 32, 40 }) {
        const forward_input in = random_input(n_tokens, rng);
        CHECK(run(f.layer, &engine, in, 2, &gpu) == run(f.layer, nullptr, in, 2));
    }
    engine.worker.reset();
}

// Without a device all threads wait for each other three times in a layer's experts: after dispatch, after the experts
// themselves, and after their sum. More threads than cores change nothing.
static void test_synchronisations(bool weight_before_ffn) {
    const layer_fixture  f(weight_before_ffn);
    const spac_kernels * kernels = spac_kernels_best();
    if (!kernels) {
        return;
    }
    kernels_engine engine(*kernels);
    std::mt19937   rng(9);
    const auto     stock = [&](const llama_moe_hook_params & p, spac_split_node *) { return build_stock(p, f.layer); };
    const auto     ours  = [](const llama_moe_hook_params & p, spac_split_node * node) { return spac_build_split_kernels(p, node, nullptr); };
    for (const int n_tokens : { 1, 9, 40 }) {
        const forward_input      in      = random_input(n_tokens, rng);
        int                      n_stock = 0, n_ours = 0;
        const std::vector<float> expected = run_built(f.layer, nullptr, stock, in, 2, nullptr, &n_stock);
        const std::vector<float> rows     = run_built(f.layer, &engine, ours, in, 2, nullptr, &n_ours);
        n_ours -= weight_before_ffn ? 2 : 0; // the weighting of the input, which is llama.cpp's
        printf("%d tokens: %d synchronisations per layer, of llama.cpp's graph %d and those within its matmuls\n", n_tokens, n_ours, n_stock);
        CHECK(n_ours <= 3 && n_ours < n_stock);

        double error = 0, norm = 0;
        for (size_t i = 0; i < rows.size(); i++) {
            error += pow(rows[i] - expected[i], 2);
            norm += pow(expected[i], 2);
        }
        CHECK(error <= 0.05 * 0.05 * norm);
        for (const int n_threads : { 1, 8 }) {
            CHECK(run_built(f.layer, &engine, ours, in, n_threads, nullptr, nullptr) == rows);
        }
    }
}

int main() {
    for (bool weight_before_ffn : { false, true }) {
        test_synchronisations(weight_before_ffn);
    }
    for (bool weight_before_ffn : { false, true }) {
        test_beside_a_gpu(weight_before_ffn);
    }
    for (bool with_executor : { false, true }) {
        for (bool weight_before_ffn : { false, true }) {
            test(with_executor, weight_before_ffn);
        }
    }
    return 0;
}
