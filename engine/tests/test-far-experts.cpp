// patches/upstream/0002: an expert that lies 2^31 elements and more from the first one gives the rows of the same expert
// beside the first. On every GPU with enough memory; of the 8 GiB only a few pages are touched.
#include "check.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <array>
#include <random>

static constexpr int64_t N_IN = 64, N_USED = 2;
// from one expert to the next; the last is 2^31 floats, or pairs of half floats, away
static constexpr size_t                  FAR_STRIDE = (size_t) 2 << 30;
static constexpr int64_t                 N_EXPERT   = 5;
static constexpr std::array<int, 3>      USED       = { 0, 1, N_EXPERT - 1 };
static constexpr std::array<int, N_USED> IDS[]      = {
    { 0, 4 },
    { 4, 1 },
    { 1, 4 },
    { 0, 1 },
    { 4, 0 }
};

struct test_case {
    ggml_type type;
    int64_t   n_out, n_tokens;
    bool      far;
};

static size_t bytes_of_expert(const test_case & c) {
    return ggml_row_size(c.type, N_IN) * c.n_out;
}

// up lies behind gate within each expert's part of `all`
static ggml_tensor * view(ggml_context * ctx, ggml_tensor * all, const test_case & c, size_t stride, int part) {
    return ggml_view_3d(ctx, all, N_IN, c.n_out, N_EXPERT, ggml_row_size(c.type, N_IN), stride, part * bytes_of_expert(c));
}

// a few token rows of SwiGLU, whose products a GPU may fuse, then of only one product
static std::vector<float> compute(ggml_backend_t backend, const test_case & c) {
    std::mt19937                          rng(3);
    std::uniform_real_distribution<float> uniform(-1, 1);
    const size_t                          stride = c.far ? FAR_STRIDE : 2 * bytes_of_expert(c);
    const size_t                          bytes  = (N_EXPERT - 1) * stride + 2 * bytes_of_expert(c);

    ggml_context * ctx       = ggml_init({ 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_tensor *  all       = ggml_new_tensor_1d(ctx, c.type, bytes / ggml_type_size(c.type));
    ggml_tensor *  x         = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_IN, 1, c.n_tokens);
    ggml_tensor *  ids       = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, N_USED, c.n_tokens);
    ggml_tensor *  weights[] = { view(ctx, all, c, stride, 0), view(ctx, all, c, stride, 1) };
    const auto     mul       = [&](int part) { return ggml_mul_mat_id(ctx, weights[part], x, ids); };
    ggml_tensor *  outs[]    = { ggml_swiglu_split(ctx, mul(0), mul(1)), mul(1) };
    ggml_cgraph *  gf        = ggml_new_graph(ctx);
    for (ggml_tensor * w : weights) {
        ggml_build_forward_expand(gf, w); // first: a view between two products keeps them from being fused
    }
    for (ggml_tensor * out : outs) {
        ggml_set_output(out);
        ggml_build_forward_expand(gf, out);
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    CHECK(buffer);

    std::vector<float> values(2 * c.n_out * N_IN);
    std::vector<char>  experts(2 * bytes_of_expert(c));
    for (int ie : USED) {
        for (float & v : values) {
            v = uniform(rng);
        }
        ggml_quantize_chunk(c.type, values.data(), experts.data(), 0, 2 * c.n_out, N_IN, nullptr);
        ggml_backend_tensor_set(all, experts.data(), ie * stride, experts.size());
    }
    values.resize(c.n_tokens * N_IN);
    for (float & v : values) {
        v = uniform(rng);
    }
    ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    for (int64_t it = 0; it < c.n_tokens; it++) {
        ggml_backend_tensor_set(ids, IDS[it % std::size(IDS)].data(), it * ids->nb[1], N_USED * sizeof(int));
    }
    CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS);

    std::vector<float> rows;
    for (ggml_tensor * out : outs) {
        rows.resize(rows.size() + ggml_nelements(out));
        ggml_backend_tensor_get(out, rows.data() + rows.size() - ggml_nelements(out), 0, ggml_nbytes(out));
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return rows;
}

static int run_all(ggml_backend_dev_t device) {
    int            n_run   = 0;
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    CHECK(backend);
    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 }) {
        for (int64_t n_tokens : { 1, 5, 20 }) { // one kernel each; with 48 rows a fourth
            for (int64_t n_out : { 64, 48 }) {
                CHECK(compute(backend, { type, n_out, n_tokens, true }) == compute(backend, { type, n_out, n_tokens, false }));
                n_run++;
            }
        }
    }
    ggml_backend_free(backend);
    return n_run;
}

// test-far-experts [DEVICE]: all GPUs that there are unless named
int main(int argc, char ** argv) {
    ggml_backend_load_all();
    const std::string only    = argc > 1 ? argv[1] : "";
    bool              is_done = only.empty();
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        const char *       name   = ggml_backend_dev_name(device);
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU || (!only.empty() && only != name)) {
            continue;
        }
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(device, &free, &total);
        if (free > (N_EXPERT - 1) * FAR_STRIDE + FAR_STRIDE / 2) {
            printf("%s: %d cases\n", name, run_all(device));
            is_done = true;
        } else {
            printf("%s: %zu MiB free, too few for experts 8 GiB apart\n", name, free >> 20);
        }
    }
    return is_done ? 0 : 2;
}
