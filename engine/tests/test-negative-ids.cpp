// patches/upstream/0001, 0002: MUL_MAT_ID and ADD_ID skip negative ids, whatever the type, width and number of threads;
// on the CPU, and on every GPU that this build sees.
#include "check.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <random>

struct test_case {
    ggml_type type;
    int       n_expert, n_used, n_tokens, n_threads;
    bool      broadcast; // one input row per token, as for up and gate
    double    share;     // of ids that are skipped
};

static constexpr int N_IN = 256, N_OUT = 48;

static std::vector<float> random_floats(size_t n, std::mt19937 & rng) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float>                    values(n);
    for (float & v : values) {
        v = uniform(rng);
    }
    return values;
}

// distinct experts per token, some of them skipped
static std::vector<int32_t> random_ids(const test_case & c, std::mt19937 & rng) {
    std::vector<int32_t> ids;
    for (int it = 0; it < c.n_tokens; it++) {
        std::vector<int32_t> all(c.n_expert);
        for (int i = 0; i < c.n_expert; i++) {
            all[i] = i;
        }
        std::shuffle(all.begin(), all.end(), rng);
        for (int iu = 0; iu < c.n_used; iu++) {
            const bool skip = std::uniform_real_distribution<>(0, 1)(rng) < c.share;
            ids.push_back(skip ? -1 : all[iu]);
        }
    }
    return ids;
}

static void set_weights(ggml_tensor * t, std::mt19937 & rng) {
    const std::vector<float> values = random_floats(ggml_nelements(t), rng);
    std::vector<char>        bytes(ggml_nbytes(t));
    ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
    ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
}

struct graph_result {
    std::vector<float> product, sum; // [n_tokens * n_used, N_OUT]
};

static ggml_backend_t open_device(ggml_backend_dev_t device, int n_threads) {
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    CHECK(backend);
    if (ggml_backend_is_cpu(backend)) {
        ggml_backend_cpu_set_n_threads(backend, n_threads);
    }
    return backend;
}

// the same weights, inputs and biases for the same seed
static graph_result compute(ggml_backend_dev_t device, const test_case & c, const std::vector<int32_t> & ids) {
    std::mt19937   rng(7);
    ggml_context * ctx     = ggml_init({ 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_backend_t backend = open_device(device, c.n_threads);

    ggml_tensor * w       = ggml_new_tensor_3d(ctx, c.type, N_IN, N_OUT, c.n_expert);
    ggml_tensor * x       = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_IN, c.broadcast ? 1 : c.n_used, c.n_tokens);
    ggml_tensor * b       = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_OUT, c.n_expert);
    ggml_tensor * i       = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, c.n_used, c.n_tokens);
    ggml_tensor * product = ggml_mul_mat_id(ctx, w, x, i);
    ggml_tensor * sum     = ggml_add_id(ctx, product, b, i);
    ggml_cgraph * gf      = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, sum);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_buffer_clear(buffer, 0x5a); // what is not written shows

    set_weights(w, rng);
    for (ggml_tensor * t : { x, b }) {
        const std::vector<float> values = random_floats(ggml_nelements(t), rng);
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    }
    ggml_backend_tensor_set(i, ids.data(), 0, ggml_nbytes(i));
    CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS);

    graph_result r;
    r.product.resize(ggml_nelements(product));
    r.sum.resize(ggml_nelements(sum));
    ggml_backend_tensor_get(product, r.product.data(), 0, ggml_nbytes(product));
    ggml_backend_tensor_get(sum, r.sum.data(), 0, ggml_nbytes(sum));
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(backend);
    ggml_free(ctx);
    return r;
}

// one result to the last bit on the CPU; a GPU may take another kernel for another number of rows
static bool agree(float a, float b, bool exact) {
    return exact ? a == b : std::fabs(a - b) <= 2e-2f * std::max(1.0f, std::fabs(b));
}

// ids that are not skipped give the same result, however the others are divided
static void run(ggml_backend_dev_t device, const test_case & c, unsigned seed) {
    std::mt19937 rng(seed);
    test_case    whole             = c;
    whole.share                    = 0;
    const std::vector<int32_t> all = random_ids(whole, rng);

    std::vector<int32_t>             here = all, there = all;
    std::uniform_real_distribution<> uniform(0, 1);
    std::vector<bool>                moved(c.n_expert); // by expert, as a split does it: the rows of an expert stay together
    for (int ie = 0; ie < c.n_expert; ie++) {
        moved[ie] = uniform(rng) < c.share;
    }
    for (size_t i = 0; i < all.size(); i++) {
        (moved[all[i]] ? here : there)[i] = -1;
    }

    const bool         exact = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    const graph_result stock = compute(device, c, all), a = compute(device, c, here), b = compute(device, c, there);
    for (size_t i = 0; i < all.size(); i++) {
        const graph_result & on  = here[i] < 0 ? b : a;
        const graph_result & off = here[i] < 0 ? a : b;
        for (int o = 0; o < N_OUT; o++) {
            const size_t at = i * N_OUT + o;
            CHECK(agree(on.product[at], stock.product[at], exact));
            CHECK(agree(on.sum[at], stock.sum[at], exact));
            CHECK(off.product[at] == 0.0f);
            CHECK(off.sum[at] == 0.0f);
        }
    }
}

static void run_all(ggml_backend_dev_t device) {
    unsigned seed = 0;
    for (ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K,
                            GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4 }) {
        for (int n_tokens : { 1, 2, 5, 16 }) {
            for (double share : { 0.0, 0.4, 1.0 }) {
                run(device, { type, 8, 3, n_tokens, 1 + (int) (seed % 3), seed % 2 == 0, share }, seed);
                seed++;
            }
        }
    }
    run(device, { GGML_TYPE_Q8_0, 2000, 4, 9, 2, true, 0.5 }, 99); // a pool of many slots
}

int main() {
    ggml_backend_load_all();
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        printf("%s\n", ggml_backend_dev_name(device));
        run_all(device);
    }
    return 0;
}
