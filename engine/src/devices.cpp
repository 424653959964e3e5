// ggml's devices, and what memory and link really do.
#include "base/clock.h"
#include "base/engine-params.h"
#include "base/status.h"
#include "cache/slot-copy.h"
#include "host/dense-matmul.h"
#include "host/row-block.h"
#include "plan/lost-server.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

int32_t spac_device_count(void) {
    return (int32_t) ggml_backend_dev_count();
}

static spac_device_info describe(ggml_backend_dev_t device) {
    size_t free_bytes = 0, total_bytes = 0;
    ggml_backend_dev_memory(device, &free_bytes, &total_bytes);

    spac_device_info info = {};
    snprintf(info.name, sizeof(info.name), "%s", ggml_backend_dev_name(device));
    snprintf(info.description, sizeof(info.description), "%s", ggml_backend_dev_description(device));
    info.type         = ggml_backend_dev_type(device);
    info.memory_free  = free_bytes;
    info.memory_total = total_bytes;
    info.handle       = device;
    info.has_pinned   = ggml_backend_dev_host_buffer_type(device) != nullptr;
    return info;
}

spac_status spac_device_get_info(int32_t index, spac_device_info * info) {
    return spac_guard([&] {
        if (!info || index < 0 || (size_t) index >= ggml_backend_dev_count()) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                             spac_format("device %d of %zu: no such device, or no info", index, ggml_backend_dev_count()));
        }
        *info = describe(ggml_backend_dev_get(index));
    });
}

spac_status spac_devices_find(const char * names, int32_t * indices, int32_t * n_found) {
    return spac_guard([&] {
        if (!names || !indices || !n_found) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "spac_devices_find: no names, or nowhere to put what is found");
        }
        std::vector<ggml_backend_dev_t> all;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            all.push_back(ggml_backend_dev_get(i));
        }
        const bool                            is_auto = spac_read_device(names) == SPAC_DEVICE_AUTO;
        const std::vector<ggml_backend_dev_t> found   = spac_choose_devices(names, is_auto ? spac_gpus_of_machine(all) : all);
        *n_found                                      = (int32_t) found.size();
        for (size_t i = 0; i < found.size(); i++) {
            indices[i] = (int32_t) (std::find(all.begin(), all.end(), found[i]) - all.begin());
        }
    });
}

spac_status spac_device_add_rpc(const char * endpoint) {
    return spac_guard([&] {
        ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
        if (!rpc) {
            throw spac_error(SPAC_STATUS_DEVICE, "this build has no RPC backend: build with GGML_RPC=ON");
        }
        spac_name_lost_server(endpoint ? endpoint : ""); // it may be gone before it has answered
        using add_server_t            = ggml_backend_reg_t (*)(const char *);
        const auto         add_server = (add_server_t) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server");
        ggml_backend_reg_t server     = endpoint && add_server ? add_server(endpoint) : nullptr;
        if (!server) {
            throw spac_error(SPAC_STATUS_DEVICE, spac_format("no RPC server at %s: is ggml-rpc-server running there?", endpoint ? endpoint : "(null)"));
        }
        ggml_backend_register(server);
    });
}

void * spac_cpu_buffer_type(void) {
    return ggml_backend_cpu_buffer_type();
}

static const spac_kernels * kernels_for(int32_t type) {
    const spac_kernels * kernels = spac_kernels_best();
    return kernels && type >= 0 && type < GGML_TYPE_COUNT && kernels->dot((ggml_type) type) ? kernels : nullptr;
}

spac_status spac_has_kernels(int32_t type, bool * found) {
    return spac_guard([&] { *found = kernels_for(type); });
}

spac_status spac_kernels_name(const char ** name) {
    return spac_guard([&] {
        const spac_kernels * kernels = spac_kernels_best();
        *name                        = kernels ? kernels->name : "";
    });
}

spac_status spac_tokens_per_expert(int32_t * n) {
    return spac_guard([&] {
        const spac_kernels * kernels = spac_kernels_best();
        *n                           = kernels ? kernels->n_tokens_full : 0;
    });
}

// ---- measuring

static constexpr size_t READ_BYTES   = 256ull << 20; // of a pass
static constexpr size_t LINK_BYTES   = 64ull << 20;
static constexpr int    N_REPEATS    = 5;
static constexpr int    N_TOKENS_MAX = 512; // of a kernel's measurement

static uint64_t read_all(const uint64_t * data, size_t n) {
    uint64_t sum[8] = {};
    for (size_t i = 0; i + 8 <= n; i += 8) {
        for (int k = 0; k < 8; k++) {
            sum[k] += data[i + k];
        }
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

// Weights come from memory, but the last cache of some processors is as large as a pass: each pass reads another part then,
// and all of them, for one token, take thrice that cache or 1 GiB.
static int64_t n_parts() {
#ifdef _SC_LEVEL3_CACHE_SIZE
    return std::min<int64_t>(4, 1 + (int64_t) (3 * std::max<long>(0, sysconf(_SC_LEVEL3_CACHE_SIZE)) / READ_BYTES));
#else
    return 1;
#endif
}

// pass: of one part
static double median_gb_s(size_t bytes, const std::function<void(int64_t i_part)> & pass) {
    pass(0); // first touch
    std::array<double, N_REPEATS> found;
    for (int i = 0; i < N_REPEATS; i++) {
        const int64_t  i_part = (i + 1) % n_parts();
        const uint64_t t0     = spac_now_us();
        pass(i_part);
        found[i] = bytes / 1e3 / std::max<uint64_t>(1, spac_now_us() - t0);
    }
    std::sort(found.begin(), found.end());
    return found[N_REPEATS / 2];
}

spac_status spac_measure_host_gb_s(int32_t n_threads, double * gb_s) {
    return spac_guard([&] {
        if (n_threads < 1 || n_threads > SPAC_MAX_THREADS || !gb_s) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("n_threads is %d: give 1 to %d", n_threads, SPAC_MAX_THREADS));
        }
        const size_t          n = READ_BYTES / sizeof(uint64_t), part = n / n_threads;
        std::vector<uint64_t> data(n * n_parts(), 1);
        std::atomic<uint64_t> sink{ 0 };
        *gb_s = median_gb_s(part * n_threads * sizeof(uint64_t), [&](int64_t i_part) {
            const uint64_t *               from = data.data() + i_part * n;
            std::vector<std::future<void>> passes; // each waits for its thread when it goes, also where one cannot be made
            for (int i = 0; i < n_threads; i++) {
                passes.push_back(std::async(std::launch::async, [&, i] { sink += read_all(from + i * part, part); }));
            }
        });
    });
}

// of a measurement, whose result goes to `out`
static void check_counts(int32_t n_threads, int32_t n_tokens, const double * out) {
    if (n_threads < 1 || n_threads > SPAC_MAX_THREADS || n_tokens < 1 || n_tokens > N_TOKENS_MAX || !out) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("%d threads, %d tokens: give 1 to %d threads, and 1 to %d tokens", n_threads, n_tokens,
                                                                   SPAC_MAX_THREADS, N_TOKENS_MAX));
    }
}

// rows of weights, in pages as the model's, times the same tokens, as host-experts.cpp multiplies one expert's
struct kernel_pass {
    static constexpr int64_t N_COLS = 2048;

    const spac_kernels &     kernels;
    const spac_panel * const panel;
    const spac_act_form      form;
    const size_t             act_bytes, row_bytes;
    const int32_t            n_tokens;
    const int64_t            n_rows; // of a part; fewer for many tokens: reading takes no time then

    const std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> weights;
    const std::unique_ptr<char, decltype(&free)>                                    acts;
    ggml_tensor                                                                     matrix{};

    kernel_pass(const spac_kernels & kernels, ggml_type type, int32_t n_tokens) :
        kernels(kernels), panel(spac_panel_for(kernels, type, n_tokens)), form(panel ? panel->form : spac_act_form_of(kernels, type)),
        act_bytes(spac_act_bytes(form, N_COLS)), row_bytes(ggml_row_size(type, N_COLS)), n_tokens(n_tokens),
        n_rows((int64_t) (READ_BYTES / row_bytes) / (1 + n_tokens / SPAC_DOT_TOKENS) / SPAC_PANEL_ROWS * SPAC_PANEL_ROWS),
        weights(ggml_backend_buft_alloc_buffer((ggml_backend_buffer_type_t) spac_host_buffer_type(), n_parts() * n_rows * row_bytes), ggml_backend_buffer_free),
        acts((char *) aligned_alloc(64, act_bytes * GGML_PAD(n_tokens, spac_act_group(form))), free) { // act_bytes is a multiple of 64
        if (!weights || !acts) {
            throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("no room for the %zu MiB of the measurement: free memory", n_parts() * n_rows * row_bytes >> 20));
        }
        matrix.type  = type;
        matrix.ne[0] = N_COLS;
        matrix.nb[1] = row_bytes;
        memset(ggml_backend_buffer_get_base(weights.get()), 0x3c, n_parts() * n_rows * row_bytes); // in every type scales that are no extremes
        const std::vector<float>         x(N_COLS, 0.5f);
        const std::vector<const float *> same(SPAC_ACT_GROUP, x.data());
        for (int32_t t = 0; t < n_tokens; t += spac_act_group(form)) {
            spac_prepare_acts(kernels, form, same.data(), std::min(n_tokens - t, spac_act_group(form)), N_COLS, acts.get() + t * act_bytes);
        }
    }

    int64_t n_blocks() const { return n_rows / SPAC_PANEL_ROWS; }

    void run(int64_t i_part, int64_t first, int64_t last) const { // of the blocks
        const size_t                                 panel_bytes = panel ? panel->bytes(N_COLS) : 0;
        const int64_t                                n_panels    = spac_n_panels(panel_bytes, n_tokens);
        const std::unique_ptr<char, decltype(&free)> memory((char *) aligned_alloc(64, std::max<size_t>(64, n_panels * panel_bytes)), free);
        std::vector<float>                           values((size_t) n_tokens * SPAC_PANEL_ROWS);
        const char *                                 data = (const char *) ggml_backend_buffer_get_base(weights.get()) + i_part * n_rows * row_bytes;
        const auto                                   take = [&](int64_t r, int64_t n, int64_t i) {
            return spac_row_block(kernels, &matrix, data, r, n, panel, memory.get() + i * panel_bytes);
        };
        const auto multiply = [&](spac_row_block & block, int t0, int n) {
            const char * from[SPAC_PANEL_TOKENS];
            float *      to[SPAC_PANEL_TOKENS];
            for (int t = 0; t < n; t++) {
                from[t] = spac_act_at(form, acts.get(), act_bytes, t0 + t);
                to[t]   = values.data() + (size_t) (t0 + t) * SPAC_PANEL_ROWS;
            }
            block.multiply(from, n, to);
        };
        spac_for_each_group(first * SPAC_PANEL_ROWS, last * SPAC_PANEL_ROWS, SPAC_PANEL_ROWS, n_panels, n_tokens, panel, take, multiply);
    }
};

spac_status spac_measure_kernel_gb_s(int32_t type, int32_t n_tokens, int32_t n_threads, double * gb_s) {
    return spac_guard([&] {
        check_counts(n_threads, n_tokens, gb_s);
        const spac_kernels * kernels = kernels_for(type);
        if (!kernels) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("type %d: the engine has no kernel for it on this machine", type));
        }
        const kernel_pass pass(*kernels, (ggml_type) type, n_tokens);
        const int64_t     n_blocks = pass.n_blocks(), n_per_task = std::max<int64_t>(1, spac_rows_per_task(pass.n_rows, pass.row_bytes, 1, n_threads) / SPAC_PANEL_ROWS);
        *gb_s = median_gb_s(pass.n_rows * pass.row_bytes, [&](int64_t i_part) {
            std::atomic<int64_t>           next{ 0 }; // block: threads take tasks, as in a model, so none waits for a slower one's half
            std::vector<std::future<void>> parts;
            for (int i = 0; i < n_threads; i++) {
                parts.push_back(std::async(std::launch::async, [&] {
                    for (int64_t first = next.fetch_add(n_per_task); first < n_blocks; first = next.fetch_add(n_per_task)) {
                        pass.run(i_part, first, std::min(first + n_per_task, n_blocks));
                    }
                }));
            }
        });
    });
}

// some layers of tokens that see so many, of 32 heads with 4 of keys, as Qwen3-30B-A3B's
struct attention_pass {
    static constexpr int64_t N_KEYS = 512, N_HEADS = 32, N_HEADS_KV = 4, N_ELEMENTS = 128;

    const int                                                                 n_layers; // enough for threads to be awake in most of them
    const std::unique_ptr<ggml_context, decltype(&ggml_free)>                 ctx;
    const std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)>         cpu;
    ggml_cgraph * const                                                       graph;
    std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer;

    attention_pass(int32_t n_tokens, int32_t n_threads) :
        n_layers(std::max(2, 64 / n_tokens)), ctx(ggml_init({ 16 * n_layers * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }), ggml_free),
        cpu(ggml_backend_cpu_init(), ggml_backend_free), graph(ggml_new_graph(ctx.get())), buffer(nullptr, ggml_backend_buffer_free) {
        const auto heads = [&](ggml_type type, int64_t n_heads, int64_t n) {
            return ggml_permute(ctx.get(), ggml_new_tensor_3d(ctx.get(), type, N_ELEMENTS, n_heads, n), 0, 2, 1, 3);
        };
        for (int i = 0; i < n_layers; i++) {
            ggml_build_forward_expand(graph, ggml_flash_attn_ext(ctx.get(), heads(GGML_TYPE_F32, N_HEADS, n_tokens), heads(GGML_TYPE_F16, N_HEADS_KV, N_KEYS),
                                                                 heads(GGML_TYPE_F16, N_HEADS_KV, N_KEYS), nullptr, 0.1f, 0, 0));
        }
        spac_dense_matmul({}, spac_kernels_best()).mark(graph);
        ggml_backend_cpu_set_n_threads(cpu.get(), n_threads);
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), cpu.get()));
        if (!buffer) {
            throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, "no room to measure attention: free memory");
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
    }

    size_t n_operations(int32_t n_tokens) const { return 4 * n_layers * N_KEYS * N_HEADS * N_ELEMENTS * n_tokens; }
};

spac_status spac_measure_attention_gop_s(int32_t n_tokens, int32_t n_threads, double * gop_s) {
    return spac_guard([&] {
        check_counts(n_threads, n_tokens, gop_s);
        const attention_pass pass(n_tokens, n_threads);
        *gop_s = median_gb_s(pass.n_operations(n_tokens), [&](int64_t) { ggml_backend_graph_compute(pass.cpu.get(), pass.graph); });
    });
}

spac_status spac_measure_link_gb_s(const char * name, double * gb_s) {
    return spac_guard([&] {
        ggml_backend_dev_t device = name ? ggml_backend_dev_by_name(name) : nullptr;
        if (!device || !gb_s) {
            throw spac_error(SPAC_STATUS_DEVICE, spac_format("no device \"%s\"", name ? name : "(null)"));
        }
        const std::unique_ptr<ggml_context, decltype(&ggml_free)>                       ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }), ggml_free);
        const std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)>               backend(ggml_backend_dev_init(device, nullptr), ggml_backend_free);
        ggml_tensor *                                                                   t = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, LINK_BYTES);
        const std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer(
            backend ? ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()) : nullptr, ggml_backend_buffer_free);
        if (!buffer) {
            throw spac_error(SPAC_STATUS_OUT_OF_MEMORY, spac_format("%s has no room for the %zu MiB of the measurement: free memory there", name, LINK_BYTES >> 20));
        }
        // pinned where the device can, as the experts are
        ggml_backend_buffer_type_t                                                      host_buft = ggml_backend_dev_host_buffer_type(device);
        const std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> host(
            ggml_backend_buft_alloc_buffer(host_buft ? host_buft : ggml_backend_cpu_buffer_type(), LINK_BYTES), ggml_backend_buffer_free);
        void * data = ggml_backend_buffer_get_base(host.get());
        memset(data, 1, LINK_BYTES);
        *gb_s = median_gb_s(LINK_BYTES, [&](int64_t) { // as slots are filled
            if (spac_copies_by_buffer(device)) {
                ggml_backend_tensor_set(t, data, 0, LINK_BYTES);
                return;
            }
            ggml_backend_tensor_set_async(backend.get(), t, data, 0, LINK_BYTES);
            ggml_backend_synchronize(backend.get());
        });
    });
}
