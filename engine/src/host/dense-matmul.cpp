// Before ggml's CPU backend computes an operation, it asks each of its "extra" buffer types whether that one will
// (ggml-cpu/traits.h). Ours has no buffers: it knows the nodes by a mark, which their `extra` is.
#include "dense-matmul.h"

#include "attention.h"
#include "base/clock.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu/ggml-cpu-impl.h"
#include "ggml-cpu/traits.h"
#include "kernels.h"
#include "row-block.h"

#include <algorithm>
#include <climits>
#include <memory>
#include <vector>

static constexpr size_t ALIGNMENT = 64; // of activations

// Where a product takes about as long as threads that wait for each other: values of activations, bytes of weights.
static constexpr int64_t SMALL_INPUT  = 4096;
static constexpr size_t  SMALL_MATRIX = 1 << 20;

static thread_local const ggml_tensor * last_node = nullptr; // of the graph that this thread marked last
static thread_local uint64_t            t_end     = 0;       // of its multiplication

// ---- the multiplication

// Rows of floats are ggml's, whose kernels are as fast, where no panel takes them: tiles take BF16.
static bool has_kernel(const spac_kernels & kernels, ggml_type type, int64_t n_tokens) {
    return ggml_is_quantized(type) ? kernels.dot(type) != nullptr : spac_panel_for(kernels, type, n_tokens) != nullptr;
}

struct dense_traits : ggml::cpu::tensor_traits {
    const spac_kernels * kernels;

    explicit dense_traits(const spac_kernels * kernels) :
        kernels(kernels) {}

    const spac_panel * panel_of(const ggml_tensor * op) const { return spac_panel_for(*kernels, op->src[0]->type, op->src[1]->ne[1]); }

    spac_act_form form_of(const ggml_tensor * op) const {
        const spac_panel * panel = panel_of(op);
        return panel ? panel->form : SPAC_ACT_Q8;
    }

    size_t act_bytes_of(const ggml_tensor * op) const { return spac_act_bytes(form_of(op), op->src[0]->ne[0]); }

    size_t panel_bytes_of(const ggml_tensor * op) const {
        const spac_panel * panel = panel_of(op);
        return panel ? panel->bytes(op->src[0]->ne[0]) : 0;
    }

    int64_t n_panels_of(const ggml_tensor * op) const { return spac_n_panels(panel_bytes_of(op), op->src[1]->ne[1]); }

    size_t thread_bytes_of(const ggml_tensor * op) const { return n_panels_of(op) * panel_bytes_of(op); }

    bool is_small(const ggml_tensor * op) const {
        return !panel_of(op) && ggml_nelements(op->src[1]) <= SMALL_INPUT && ggml_nbytes(op->src[0]) <= SMALL_MATRIX;
    }

    bool can_compute(const ggml_tensor * op) const {
        if (op->op == GGML_OP_FLASH_ATTN_EXT) {
            return spac_can_attend(*kernels, op);
        }
        const ggml_tensor * x = op->src[1];
        return x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && x->ne[2] * x->ne[3] == 1 && has_kernel(*kernels, op->src[0]->type, x->ne[1]);
    }

    // panels of the threads, then activations
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        if (!can_compute(op)) {
            return false;
        }
        if (op->op == GGML_OP_FLASH_ATTN_EXT) {
            size = spac_attention_work_size(*kernels, op, n_threads);
            return true;
        }
        const size_t bytes = GGML_PAD(op->src[1]->ne[1], spac_act_group(form_of(op))) * act_bytes_of(op);
        size               = n_threads * thread_bytes_of(op) + (is_small(op) ? n_threads : 1) * bytes + ALIGNMENT;
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (!can_compute(op)) {
            return false;
        }
        if (op->op == GGML_OP_FLASH_ATTN_EXT) {
            spac_attend(*kernels, *params, op);
            return true;
        }
        char * memory = (char *) GGML_PAD((uintptr_t) params->wdata, ALIGNMENT);
        if (is_small(op)) {
            multiply_alone(*params, *op, memory);
        } else {
            multiply_together(*params, *op, memory);
        }
        if (op == last_node) { // only on the graph's own thread
            t_end = spac_now_us();
        }
        return true;
    }

  private:
    // an equal share, with activations of its own
    void multiply_alone(const ggml_compute_params & params, const ggml_tensor & op, char * memory) const {
        char * acts = memory + params.ith * op.src[1]->ne[1] * act_bytes_of(&op);
        prepare(op, acts, 0, 1);
        const int64_t n_rows = op.src[0]->ne[1], n = GGML_PAD((n_rows + params.nth - 1) / params.nth, SPAC_TASK_ROWS_MIN);
        const int64_t r0 = std::min(n_rows, params.ith * n);
        multiply(op, acts, r0, std::min(n, n_rows - r0), nullptr);
    }

    void multiply_together(const ggml_compute_params & params, const ggml_tensor & op, char * panels) const {
        char * acts = panels + params.nth * thread_bytes_of(&op);
        prepare(op, acts, params.ith, params.nth);
        if (params.ith == 0) {
            ggml_threadpool_chunk_set(params.threadpool, params.nth);
        }
        ggml_barrier(params.threadpool);

        const ggml_tensor * w          = op.src[0];
        const int64_t       n_per_task = spac_rows_per_task(w->ne[1], w->nb[1], 1, params.nth);
        const int64_t       n_tasks    = (w->ne[1] + n_per_task - 1) / n_per_task;
        for (int64_t i = params.ith; i < n_tasks; i = ggml_threadpool_chunk_add(params.threadpool, 1)) {
            const int64_t r0 = i * n_per_task;
            multiply(op, acts, r0, std::min(n_per_task, w->ne[1] - r0), panels + params.ith * thread_bytes_of(&op));
        }
    }

    // those of thread ith of nth
    void prepare(const ggml_tensor & op, char * acts, int ith, int nth) const {
        const ggml_tensor * const x    = op.src[1];
        const spac_act_form       form = form_of(&op);
        const int64_t             n    = spac_act_group(form);
        for (int64_t first = ith * n; first < x->ne[1]; first += nth * n) {
            const float * rows[SPAC_ACT_GROUP];
            const int     n_here = (int) std::min(x->ne[1] - first, n);
            for (int t = 0; t < n_here; t++) {
                rows[t] = (const float *) ((const char *) x->data + (first + t) * x->nb[1]);
            }
            spac_prepare_acts(*kernels, form, rows, n_here, x->ne[0], acts + first * act_bytes_of(&op));
        }
    }

    // rows r0 .. r0 + n of the weights, for all tokens; memory: for their panels
    void multiply(const ggml_tensor & op, const char * acts, int64_t r0, int64_t n, char * memory) const {
        const ggml_tensor * w     = op.src[0];
        const spac_panel *  panel = panel_of(&op);
        const spac_act_form form  = form_of(&op);
        const size_t        bytes = act_bytes_of(&op), panel_bytes = panel_bytes_of(&op);

        const auto take = [&](int64_t r, int64_t n_rows, int64_t i) {
            return spac_row_block(*kernels, w, (const char *) w->data, r, n_rows, panel, memory + i * panel_bytes);
        };
        spac_for_each_group(r0, r0 + n, panel ? SPAC_PANEL_ROWS : n, n_panels_of(&op), (int) op.ne[1], panel, take, [&](spac_row_block & block, int t0, int n_acts) {
            const char * act[SPAC_PANEL_TOKENS];
            float *      out[SPAC_PANEL_TOKENS];
            for (int t = 0; t < n_acts; t++) {
                act[t] = spac_act_at(form, acts, bytes, t0 + t);
                out[t] = (float *) ((char *) op.data + (t0 + t) * op.nb[1]) + block.r0;
            }
            block.multiply(act, n_acts, out);
        });
    }
};

// one for each set of kernels of this machine; a node's mark is the address of one of them
static const std::vector<std::unique_ptr<dense_traits>> all_traits = [] {
    std::vector<std::unique_ptr<dense_traits>> all;
    for (const spac_kernels * kernels : spac_kernels_here()) {
        all.push_back(std::make_unique<dense_traits>(kernels));
    }
    return all;
}();

// ---- how ggml comes to ask

struct dense_buffer_type : ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; } // no weights are allocated here

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        if ((op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_FLASH_ATTN_EXT) || !op->extra) {
            return nullptr;
        }
        for (const auto & traits : all_traits) {
            if (op->extra == traits.get()) {
                return traits.get();
            }
        }
        return nullptr;
    }
};

// when the library is loaded, as graphs that are being computed read the list
static const bool is_registered = [] {
    static dense_buffer_type        context;
    static ggml_backend_buffer_type type = {};
    type.iface.get_name                  = [](ggml_backend_buffer_type_t) { return "SPAC_Dense"; };
    type.iface.get_alignment             = [](ggml_backend_buffer_type_t) { return ALIGNMENT; };
    type.context                         = &context;
    ggml_backend_cpu_get_extra_buffer_types().push_back(&type);
    return true;
}();

// ---- marks

static bool is_dense_matrix(const ggml_tensor * t, const spac_kernels & kernels) {
    const bool is_matrix = t->ne[1] > 1 && t->ne[2] * t->ne[3] == 1 && has_kernel(kernels, t->type, INT_MAX);
    return is_matrix && t->buffer && ggml_backend_buffer_is_host(t->buffer) && !t->extra;
}

spac_dense_matmul::spac_dense_matmul(const std::vector<ggml_tensor *> & tensors, const spac_kernels * kernels) {
    for (const auto & traits : all_traits) {
        own_mark = traits->kernels == kernels ? traits.get() : own_mark;
    }
    for (const ggml_tensor * tensor : tensors) {
        if (is_registered && own_mark && is_dense_matrix(tensor, *kernels)) {
            weights.insert(tensor);
        }
    }
}

void spac_dense_matmul::mark(ggml_cgraph * graph) const {
    last_node = nullptr;
    for (int i = ggml_graph_n_nodes(graph) - 1; i >= 0; i--) {
        ggml_tensor * node       = ggml_graph_node(graph, i);
        const bool    is_product = node->op == GGML_OP_MUL_MAT && weights.count(node->src[0]);
        if (!is_product && node->op != GGML_OP_FLASH_ATTN_EXT) {
            continue;
        }
        last_node = last_node || !is_product ? last_node : node;
        if (node->extra == own_mark) {
            return; // a graph that is computed again: one that is built has new nodes
        }
        node->extra = own_mark;
    }
}

uint64_t spac_dense_matmul::t_graph_end() {
    return t_end;
}
