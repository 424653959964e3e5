// patches/upstream/0006: a function of the host in a device's graph. On every device that supports the op; where it runs in
// a stream, nothing waits for it before the graph's results are asked for.
#include "check.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

static constexpr int64_t N = 8, N_TOKENS = 3, N_GAP = 5;
static constexpr int     N_RUNS = 6; // CUDA records a graph in the second, and replays it from the third on

// functions wait until it is opened
struct gate {
    std::mutex              mutex;
    std::condition_variable opened;
    bool                    is_open = false;
    int                     n_left  = 0; // functions that went through

    void set(bool open) {
        std::lock_guard<std::mutex> lock(mutex);
        is_open = open;
        opened.notify_all();
    }

    void pass() {
        std::unique_lock<std::mutex> lock(mutex);
        CHECK(opened.wait_for(lock, std::chrono::seconds(60), [&] { return is_open; }));
        n_left++;
    }

    int count() {
        std::lock_guard<std::mutex> lock(mutex);
        return n_left;
    }
};

struct addend {
    gate * door;
    float  value;
};

// src: [N, N_TOKENS] with gaps, [N, N_TOKENS]; dst: their sum and the addend
static void add(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith != 0) {
        return;
    }
    const addend & a = *(addend *) user_data;
    a.door->pass();
    for (int64_t it = 0; it < N_TOKENS; it++) {
        for (int64_t i = 0; i < N; i++) {
            const auto value                  = [&](const ggml_tensor * t) { return *(const float *) ((const char *) t->data + it * t->nb[1] + i * t->nb[0]); };
            ((float *) dst->data)[it * N + i] = value(dst->src[0]) + value(dst->src[1]) + a.value;
        }
    }
}

// no source at all
static void give(ggml_tensor * dst, int ith, int, void * user_data) {
    if (ith == 0) {
        const addend & a = *(addend *) user_data;
        a.door->pass();
        std::fill_n((float *) dst->data, ggml_nelements(dst), a.value);
    }
}

// out = factor * (3 * x + x + a) + b
struct fixture {
    ggml_context *        ctx;
    ggml_tensor *         x, *scaled, *out;
    ggml_cgraph *         gf;
    ggml_backend_buffer_t buffer;
    gate                  door;
    addend                a{ &door, 0.5f }, b{ &door, 0.25f };
    float                 factor = 2;

    explicit fixture(ggml_backend_t backend) {
        ctx                  = ggml_init({ 32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
        x                    = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N + N_GAP, N_TOKENS);
        ggml_tensor * view   = ggml_view_2d(ctx, x, N, N_TOKENS, x->nb[1], 2 * sizeof(float));
        ggml_tensor * args[] = { view, ggml_scale(ctx, ggml_cont(ctx, view), 3) };
        ggml_tensor * sum    = ggml_custom_4d(ctx, GGML_TYPE_F32, N, N_TOKENS, 1, 1, args, 2, add, 1, &a);
        ggml_tensor * given  = ggml_custom_4d(ctx, GGML_TYPE_F32, N, N_TOKENS, 1, 1, nullptr, 0, give, 1, &b);
        scaled               = ggml_scale(ctx, sum, factor);
        out                  = ggml_add(ctx, scaled, given);
        gf                   = ggml_new_graph(ctx);
        ggml_build_forward_expand(gf, out);
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    }

    ~fixture() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    void set(float value) {
        std::vector<float> values(ggml_nelements(x), 1e9f);
        for (int64_t i = 0; i < N * N_TOKENS; i++) {
            values[i / N * (N + N_GAP) + 2 + i % N] = value + (float) i;
        }
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    }

    void set_factor(float value) {
        factor = value;
        memcpy(scaled->op_params, &factor, sizeof(factor));
    }

    void check(float value) {
        std::vector<float> values(N * N_TOKENS);
        ggml_backend_tensor_get(out, values.data(), 0, ggml_nbytes(out));
        for (int64_t i = 0; i < N * N_TOKENS; i++) {
            CHECK(values[i] == factor * (4 * (value + (float) i) + a.value) + b.value);
        }
    }
};

static void test_values(ggml_backend_t backend, bool in_stream) {
    fixture f(backend);
    for (int run = 0; run < N_RUNS; run++) {
        f.door.set(!in_stream);
        f.set((float) run);
        CHECK(ggml_backend_graph_compute_async(backend, f.gf) == GGML_STATUS_SUCCESS);
        CHECK(!in_stream || f.door.count() == 2 * run); // nothing waited
        f.door.set(true);
        ggml_backend_synchronize(backend);
        CHECK(f.door.count() == 2 * (run + 1));
        f.check((float) run);
    }
}

// the graph changes, so that CUDA records it anew, while the stream still runs what was recorded before
static void test_changes_in_flight(ggml_backend_t backend) {
    fixture f(backend);
    f.set(1);
    for (int run = 0; run < 3 * N_RUNS; run++) {
        f.door.set(false);
        f.set_factor((float) (1 + run / 3));
        CHECK(ggml_backend_graph_compute_async(backend, f.gf) == GGML_STATUS_SUCCESS);
        if (run % 5 == 4) {
            f.door.set(true);
            ggml_backend_synchronize(backend);
            f.check(1);
        }
    }
    f.door.set(true);
    ggml_backend_synchronize(backend);
    f.check(1);
    CHECK(f.door.count() == 2 * 3 * N_RUNS);
}

// a backend that is freed with functions ahead waits for them
static void test_free_in_flight(ggml_backend_dev_t device, int n_runs) {
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    fixture        f(backend);
    f.set(1);
    for (int run = 0; run < n_runs; run++) {
        CHECK(ggml_backend_graph_compute_async(backend, f.gf) == GGML_STATUS_SUCCESS);
    }
    CHECK(f.door.count() == 0);
    std::thread opener([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        f.door.set(true);
    });
    ggml_backend_free(backend);
    CHECK(f.door.count() == 2 * n_runs);
    opener.join();
}

static void run_all(ggml_backend_dev_t device) {
    ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    CHECK(backend);
    bool is_supported;
    {
        fixture f(backend);
        is_supported = ggml_backend_dev_supports_op(device, f.out->src[1]) && ggml_backend_dev_supports_op(device, f.out->src[0]->src[0]);
    }
    const bool in_stream = is_supported && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU;
    if (is_supported) {
        test_values(backend, in_stream);
    }
    if (in_stream) {
        test_changes_in_flight(backend);
    }
    ggml_backend_free(backend);
    for (int n_runs = 1; in_stream && n_runs <= N_RUNS; n_runs++) {
        test_free_in_flight(device, n_runs);
    }
    printf("%s: %s\n", ggml_backend_dev_name(device), in_stream ? "in its stream" : is_supported ? "supported"
                                                                                                 : "not supported");
}

// test-custom-op [DEVICE]: all that there are unless named
int main(int argc, char ** argv) {
    ggml_backend_load_all();
    const std::string only = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (only.empty() || only == ggml_backend_dev_name(device)) {
            run_all(device);
        }
    }
    return 0;
}
