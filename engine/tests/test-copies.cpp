// Experts are copied by one thread while another computes with the experts beside them, on every GPU that this build sees (on
// the CPU where there is none): results stay as they are, and the bytes arrive. ggml-vulkan has one compute queue and a lock.
#include "cache/slot-copy.h"
#include "cache/slot-pool.h"
#include "check.h"

#include "ggml-alloc.h"
#include "ggml-cpu.h"

#include <atomic>
#include <cstring>
#include <string>
#include <thread>

static constexpr int N_EMBD = 256, N_FF = 1024, N_EXPERT = 6, N_COMPUTES = 40; // experts of 512 KiB: one wait each

struct experts {
    ggml_context *        ctx = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    spac_moe_layer        layer;
    ggml_backend_buffer_t buffer;

    experts() {
        layer.n_expert              = N_EXPERT;
        layer.parts[SPAC_PART_DOWN] = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, N_EMBD, N_FF, N_EXPERT);
        buffer                      = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
        auto * values               = (ggml_fp16_t *) layer.parts[SPAC_PART_DOWN]->data;
        for (int64_t i = 0; i < ggml_nelements(layer.parts[SPAC_PART_DOWN]); i++) {
            values[i] = ggml_fp32_to_fp16((float) ((i * 37) % 101) / 101.0f - 0.5f);
        }
    }

    ~experts() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

// rows of the experts in the first half of the slots, whatever happens in the others
struct graph {
    ggml_context *        ctx = ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_backend_t        backend;
    ggml_backend_buffer_t buffer;
    ggml_tensor *         rows;
    ggml_cgraph *         gf;

    graph(ggml_backend_dev_t device, ggml_tensor * slots) :
        backend(ggml_backend_dev_init(device, nullptr)) {
        const int     n_used = N_EXPERT / 2;
        ggml_tensor * x      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_EMBD, 1, 1);
        ggml_tensor * ids    = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used + 1, 1);
        rows                 = ggml_mul_mat_id(ctx, slots, x, ids);
        gf                   = ggml_new_graph(ctx);
        ggml_build_forward_expand(gf, rows);
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);

        const std::vector<float> ones(N_EMBD, 1.0f);
        ggml_backend_tensor_set(x, ones.data(), 0, ggml_nbytes(x));
        std::vector<int32_t> of_token(n_used + 1, -1);
        for (int i = 0; i < n_used; i++) {
            of_token[i] = i;
        }
        ggml_backend_tensor_set(ids, of_token.data(), 0, ggml_nbytes(ids));
    }

    ~graph() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_free(backend);
        ggml_free(ctx);
    }

    std::vector<float> compute() {
        CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS);
        std::vector<float> values(ggml_nelements(rows));
        ggml_backend_tensor_get(rows, values.data(), 0, ggml_nbytes(rows));
        return values;
    }
};

// the second half of the slots, over and over, each with an expert that changes: by the worker's way, or by an instance's
static void copy_all(const experts & from, const spac_slot_group & group, ggml_backend_dev_t device, bool by_instance, const std::atomic<bool> & stops) {
    const ggml_tensor *  t = from.layer.parts[SPAC_PART_DOWN];
    spac_slot_copy       copy(device);
    const ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
    std::vector<char>    arrived(t->nb[2]);
    for (int pass = 0; pass == 0 || !stops; pass++) {
        for (int slot = N_EXPERT / 2; slot < N_EXPERT; slot++) {
            const int ie = (slot + pass) % N_EXPERT;
            if (by_instance) {
                ggml_backend_tensor_set_async(backend, group.parts[SPAC_PART_DOWN], (const char *) t->data + ie * t->nb[2], slot * t->nb[2], t->nb[2]);
                ggml_backend_synchronize(backend);
            } else {
                copy.copy(from.layer, from.layer.parts_of(ie), group, slot, false);
            }
            ggml_backend_tensor_get(group.parts[SPAC_PART_DOWN], arrived.data(), slot * t->nb[2], arrived.size());
            CHECK(memcmp(arrived.data(), (const char *) t->data + ie * t->nb[2], arrived.size()) == 0);
        }
    }
    ggml_backend_free(backend);
}

static void run(ggml_backend_dev_t device, bool by_instance) {
    const experts   from;
    spac_slot_group group;
    group.like    = &from.layer;
    group.n_slots = N_EXPERT;
    group.allocate(ggml_backend_dev_buffer_type(device));
    {
        spac_slot_copy copy(device);
        for (int slot = 0; slot < N_EXPERT; slot++) {
            copy.copy(from.layer, from.layer.parts_of(slot), group, slot, false);
        }
    }
    graph                    computed(device, group.parts[SPAC_PART_DOWN]);
    const std::vector<float> alone = computed.compute();
    std::atomic<bool>        stops{ false };
    std::thread              worker([&] { copy_all(from, group, device, by_instance, stops); });
    for (int i = 0; i < N_COMPUTES; i++) {
        CHECK(computed.compute() == alone);
    }
    stops = true;
    worker.join();
    CHECK(alone[0] != 0 && alone[N_EXPERT / 2 * N_FF] == 0); // the last id is -1
}

// test-copies [DEVICE]
int main(int argc, char ** argv) {
    ggml_backend_load_all();
    int n_run = 0;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (argc > 1 ? ggml_backend_dev_name(device) != std::string(argv[1]) : ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            continue;
        }
        for (const bool by_instance : { false, true }) {
            run(device, by_instance);
        }
        n_run++;
    }
    return n_run > 0 ? 0 : 2;
}
