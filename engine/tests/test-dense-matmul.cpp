// Matrices that ggml's CPU backend multiplies with the engine's kernels, against a reference in double precision and beside
// ggml's own: each format, odd sizes, any number of threads; and that other graphs stay ggml's. No model needed.
#include "check.h"
#include "host/dense-matmul.h"
#include "host/kernels.h"
#include "kernel-types.h"
#include "random-blocks.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

typedef std::vector<float> floats;

static floats random_floats(int64_t n, float size, uint32_t seed) {
    std::mt19937                    rng(seed);
    std::normal_distribution<float> normal(0, size);
    floats                          values(n);
    for (float & v : values) {
        v = normal(rng);
    }
    return values;
}

struct matrix {
    ggml_context *        ctx = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    ggml_tensor *         t;
    ggml_backend_buffer_t buffer;
    floats                values; // of the quantised ones

    matrix(ggml_type type, int64_t n_cols, int64_t n_rows, ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type()) :
        t(ggml_new_tensor_2d(ctx, type, n_cols, n_rows)), buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)),
        values(n_cols * n_rows) {
        const float       size = 1 / sqrtf((float) n_cols);
        const floats      x    = random_floats(n_cols * n_rows, size, 3);
        std::mt19937      rng(3);
        std::vector<char> bytes = has_random_blocks(type) ? random_blocks(type, n_cols * n_rows, size, rng) : std::vector<char>(ggml_nbytes(t));
        if (!has_random_blocks(type)) {
            ggml_quantize_chunk(type, x.data(), bytes.data(), 0, n_rows, n_cols, nullptr);
        }
        ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
        ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), (int64_t) values.size());
    }

    ~matrix() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

// [n_rows, n_tokens * n_batches]; dense: NULL, or who marks the graph; n_batches: a third dimension, which the engine leaves
// to ggml
static floats product(const matrix & w, const floats & x, int n_threads, const spac_dense_matmul * dense = nullptr, int64_t n_batches = 1) {
    ggml_context * ctx = ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_tensor *  in  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w.t->ne[0], (int64_t) x.size() / w.t->ne[0] / n_batches, n_batches);
    ggml_tensor *  out = ggml_mul_mat(ctx, w.t, in);
    ggml_cgraph *  gf  = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, out);
    if (dense) {
        dense->mark(gf);
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
    ggml_backend_tensor_set(in, x.data(), 0, ggml_nbytes(in));
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, n_threads);
    CHECK(ggml_backend_graph_compute(cpu, gf) == GGML_STATUS_SUCCESS);

    floats result(ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_free(cpu);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

// norm of the difference to double precision, relative to its norm
static double error_of(const matrix & w, const floats & x, const floats & y) {
    const int64_t n_cols = w.t->ne[0], n_rows = w.t->ne[1];
    double        difference = 0, norm = 0;
    for (size_t i = 0; i < y.size(); i++) {
        const float * token = &x[i / n_rows * n_cols];
        const float * row   = &w.values[i % n_rows * n_cols];
        double        sum   = 0;
        for (int64_t ic = 0; ic < n_cols; ic++) {
            sum += (double) row[ic] * token[ic];
        }
        difference += (y[i] - sum) * (y[i] - sum);
        norm += sum * sum;
    }
    return sqrt(difference / norm);
}

#ifdef SPAC_FEW_WIDTHS // a sanitizer is ten times as slow
static const std::vector<int> WIDTHS = { 1, 70 };
#else
static const std::vector<int> WIDTHS = { 1, 2, 9, 40, 70 };
#endif

static void test_format(const spac_kernels & kernels, ggml_type type) {
    const int64_t block = ggml_blck_size(type);
    for (const int64_t n_rows : { 2, 77, 2100 }) { // the last: more than one task, the last of them short
        const matrix w(type, block == 256 ? 512 : 256 + block, n_rows);
        for (const int n_tokens : WIDTHS) {
            const floats x    = random_floats(w.t->ne[0] * n_tokens, 1, 5 + n_tokens);
            const floats ggml = product(w, x, 2);

            const spac_dense_matmul dense({ w.t }, &kernels);
            const floats            ours = product(w, x, 1, &dense);
            CHECK(dense.n_weights() == 1);
            CHECK(ours != ggml || n_rows == 2); // it was us
            for (const int n_threads : { 2, 3 }) {
                CHECK(product(w, x, n_threads, &dense) == ours);
            }
            CHECK(product(w, x, 2) == ggml);

            if (n_rows == 2100) { // few values differ by chance
                const double error = error_of(w, x, ours), error_ggml = error_of(w, x, ggml);
                printf("%-7s %-6s %2d tokens: error %.3e, ggml %.3e\n", kernels.name, ggml_type_name(type), n_tokens, error, error_ggml);
                CHECK(error <= error_ggml * 1.02 + 1e-6);
            }
        }
    }
}

// a token's bits depend on the side of the rule that the batch is on, not on its neighbours
static void test_neighbours(const spac_kernels & kernels, ggml_type type) {
    const matrix            w(type, 512, 77);
    const spac_dense_matmul dense({ w.t }, &kernels);
    const floats            x = random_floats(512 * 70, 1, 3);

    const auto first = [&](int n_tokens, int n_kept) {
        const floats y = product(w, { x.begin(), x.begin() + 512 * n_tokens }, 2, &dense);
        return floats(y.begin(), y.begin() + 77 * n_kept);
    };
    CHECK(first(11, 5) == first(5, 5));
    CHECK(first(70, 24) == first(24, 24));
    const floats one(x.begin(), x.begin() + 512);
    CHECK(product(w, one, 8, &dense) == product(w, one, 1, &dense)); // some threads get no row
}

static void test_what_stays_with_ggml(const spac_kernels & kernels) {
    const matrix            f16(GGML_TYPE_F16, 64, 32), one_row(GGML_TYPE_Q8_0, 64, 1), q8(GGML_TYPE_Q8_0, 64, 32);
    const floats            x = random_floats(64 * 6, 1, 9);
    const spac_dense_matmul dense({ f16.t, one_row.t, q8.t }, &kernels);
    CHECK(dense.n_weights() == 1);
    CHECK(product(q8, x, 2, &dense, 3) == product(q8, x, 2, nullptr, 3)); // batches of matrices
    CHECK(product(q8, x, 2, &dense) != product(q8, x, 2));
}

// of rows of floats only tiles have panels
static void test_bf16(const spac_kernels & kernels) {
    const matrix            w(GGML_TYPE_BF16, 512 + 24, 77);
    const bool              has_panel = spac_panel_for(kernels, GGML_TYPE_BF16, 40);
    const spac_dense_matmul dense({ w.t }, &kernels);
    CHECK(dense.n_weights() == has_panel);
    for (const int n_tokens : { 9, 40 }) {
        const floats x = random_floats(w.t->ne[0] * n_tokens, 1, 3), ours = product(w, x, 2, &dense), ggml = product(w, x, 2);
        CHECK((ours != ggml) == (has_panel && n_tokens == 40));
        CHECK(ours == product(w, x, 3, &dense));
        CHECK(error_of(w, x, ours) <= error_of(w, x, ggml) * 1.02 + 1e-6);
    }
}

// engines come and go while another context of the model computes on the same weights: its results stay what they were
static void test_other_graphs(const spac_kernels & kernels) {
    const matrix      w(GGML_TYPE_Q8_0, 2048, 1024);
    const floats      x    = random_floats(2048 * 32, 1, 9); // a work buffer larger than ours
    const floats      ggml = product(w, x, 2);
    std::atomic<bool> done{ false };
    std::thread       engines([&] {
        while (!done) {
            const spac_dense_matmul dense({ w.t }, &kernels);
            product(w, random_floats(2048, 1, 3), 1, &dense);
        } });
    for (int i = 0; i < 20; i++) {
        CHECK(product(w, x, 2) == ggml);
    }
    done = true;
    engines.join();
}

// NULL: this machine or this build has none
static ggml_backend_buffer_type_t find_amx() {
    ggml_backend_dev_t cpu  = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto         find = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * buft = find ? find(cpu) : nullptr; buft && *buft; buft++) {
        if (strcmp(ggml_backend_buft_name(*buft), "AMX") == 0) {
            return *buft;
        }
    }
    return nullptr;
}

// ggml's AMX, in another model or a draft model, on the threads that computed with our tiles before
static void test_beside_tiles_of_ggml(const spac_kernels & kernels) {
    ggml_backend_buffer_type_t amx = find_amx();
    if (!amx) {
        printf("ggml has no AMX here: not tested beside it\n");
        return;
    }
    const matrix            w(GGML_TYPE_Q8_0, 512, 96), theirs(GGML_TYPE_Q8_0, 512, 96, amx);
    const spac_dense_matmul dense({ w.t }, &kernels);
    const floats            x = random_floats(512 * 40, 1, 3), ours = product(w, x, 2, &dense), ggml = product(theirs, x, 2);
    CHECK(error_of(w, x, ggml) < 0.02);
    for (int i = 0; i < 3; i++) {
        CHECK(product(w, x, 2, &dense) == ours);
        CHECK(product(theirs, x, 2) == ggml);
    }
}

int main() {
    const std::vector<const spac_kernels *> here = spac_kernels_here();
    for (const spac_kernels * kernels : here) {
        for (const ggml_type type : QUANTISED) {
            test_format(*kernels, type);
            test_neighbours(*kernels, type);
        }
        test_what_stays_with_ggml(*kernels);
        test_bf16(*kernels);
        test_other_graphs(*kernels);
        test_beside_tiles_of_ggml(*kernels);
    }
    printf("%zu sets of kernels tested\n", here.size());
    return 0;
}
