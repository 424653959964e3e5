#include "ggml-worker.h"

#include "base/clock.h"
#include "base/cpus.h"
#include "base/status.h"
#include "layers/expert-ffn.h"

#include <algorithm>
#include <cstring>

static constexpr size_t N_NODES_MAX = 64;

static bool has_scales(const spac_moe_layer & layer) {
    return layer.up_s || layer.gate_s || layer.down_s;
}

static ggml_threadpool_params pool_params(int n_threads, const std::vector<int> & cpus) {
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = 0; // sleep between layers: the device's driver and the graph need the cores too
    params.strict_cpu             = !cpus.empty();
    params.paused                 = !cpus.empty(); // else ggml without OpenMP would pin the thread that makes the pool
    for (int cpu : cpus) {
        params.cpumask[cpu] = true;
    }
    return params;
}

spac_ggml_worker::spac_ggml_worker(const std::vector<const spac_moe_layer *> & layers, int max_batch, int n_threads, const std::vector<int> & cpus) {
    size_t arena_bytes = 0;
    for (const spac_moe_layer * layer : layers) {
        graph g     = build(layer, max_batch);
        arena_bytes = std::max(arena_bytes, g.bytes);
        ggml_free(g.ctx);
    }
    arena.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), arena_bytes));
    if (!arena) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("no memory for the host executor: %zu bytes", arena_bytes));
    }

    ggml_threadpool_params params = pool_params(n_threads, cpus);
    threadpool.reset(ggml_threadpool_new(&params));
    backend.reset(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
    ggml_backend_cpu_set_threadpool(backend.get(), threadpool.get());

    thread = std::thread([this] { run(); });
    if (!cpus.empty()) {
        spac_pin_thread(thread, cpus[0]); // it is ggml's first worker, which ggml itself pins only beside others
    }
}

spac_ggml_worker::~spac_ggml_worker() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    changed.notify_all();
    thread.join();

    for (auto & entry : graphs) {
        ggml_free(entry.second.ctx);
    }
}

spac_ggml_worker::graph spac_ggml_worker::build(const spac_moe_layer * layer, int n_tokens) const {
    graph g;
    g.ctx = ggml_init({ N_NODES_MAX * ggml_tensor_overhead() + ggml_graph_overhead_custom(N_NODES_MAX, false), nullptr, true });

    const int64_t n_used = layer->n_expert_used;
    g.cur                = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, layer->n_embd, layer->weight_before_ffn ? n_used : 1, n_tokens);
    g.ids_host           = ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, n_used, n_tokens);
    g.ids                = has_scales(*layer) ? ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, n_used, n_tokens) : nullptr;
    g.rows               = spac_build_expert_ffn({ g.ctx, layer, layer->parts, g.cur, g.ids_host,
                                                   spac_gather_scale(g.ctx, layer->up_s, g.ids),
                                                   spac_gather_scale(g.ctx, layer->gate_s, g.ids),
                                                   spac_gather_scale(g.ctx, layer->down_s, g.ids) });
    g.gf                 = ggml_new_graph_custom(g.ctx, N_NODES_MAX, false);
    ggml_build_forward_expand(g.gf, g.rows);

    const size_t align = ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
    for (ggml_tensor * t = ggml_get_first_tensor(g.ctx); t; t = ggml_get_next_tensor(g.ctx, t)) {
        g.bytes += t->view_src ? 0 : GGML_PAD(ggml_nbytes(t), align);
    }
    return g;
}

// every node gets its own place: layers run one after the other, so all graphs share the arena
void spac_ggml_worker::place(graph & g) const {
    const size_t align = ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
    char *       next  = (char *) ggml_backend_buffer_get_base(arena.get());
    for (ggml_tensor * t = ggml_get_first_tensor(g.ctx); t; t = ggml_get_next_tensor(g.ctx, t)) {
        if (t->view_src) {
            ggml_backend_view_init(t);
            continue;
        }
        ggml_backend_tensor_alloc(arena.get(), t, next);
        next += GGML_PAD(ggml_nbytes(t), align);
    }
}

spac_ggml_worker::graph & spac_ggml_worker::graph_of(const spac_moe_layer * layer, int n_tokens) {
    graph & g = graphs[{ layer, n_tokens }];
    if (!g.ctx) {
        g = build(layer, n_tokens);
        place(g);
    }
    return g;
}

static void copy_rows(ggml_tensor * dst, const ggml_tensor * src) {
    for (int64_t i2 = 0; i2 < dst->ne[2]; i2++) {
        for (int64_t i1 = 0; i1 < dst->ne[1]; i1++) {
            memcpy((char *) dst->data + i1 * dst->nb[1] + i2 * dst->nb[2],
                   (const char *) src->data + i1 * src->nb[1] + i2 * src->nb[2], dst->ne[0] * sizeof(float));
        }
    }
}

void spac_ggml_worker::submit(const spac_moe_layer * layer, const ggml_tensor * cur, const int32_t * ids_host, const int32_t * ids, int n_tokens) {
    graph & g = graph_of(layer, n_tokens);

    // the layer before this one may be running still: it was not collected if its graph was aborted
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return !submitted; });
    done = nullptr;

    copy_rows(g.cur, cur);
    memcpy(g.ids_host->data, ids_host, ggml_nbytes(g.ids_host));
    if (g.ids) {
        memcpy(g.ids->data, ids, ggml_nbytes(g.ids));
    }

    const size_t n_rows = ggml_nelements(g.ids_host);
    const bool   empty  = std::all_of(ids_host, ids_host + n_rows, [](int32_t id) { return id < 0; });

    if (empty) { // wake no thread
        memset(g.rows->data, 0, ggml_nbytes(g.rows));
        done = &g;
        us   = 0;
        return;
    }
    submitted = &g;
    changed.notify_all();
}

const float * spac_ggml_worker::wait(uint64_t & busy_us) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done || stopped; });
    busy_us = us;
    return done ? (const float *) done->rows->data : nullptr;
}

void spac_ggml_worker::run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        changed.wait(lock, [&] { return submitted || stopped; });
        if (stopped) {
            return;
        }
        graph * g = submitted;
        lock.unlock();
        const uint64_t t0 = spac_now_us();
        ggml_backend_graph_compute(backend.get(), g->gf);
        const uint64_t t1 = spac_now_us();
        lock.lock();
        submitted = nullptr;
        done      = g;
        us        = t1 - t0;
        changed.notify_all();
    }
}
