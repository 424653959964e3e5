// The question whether a device knows of id -1, put to devices that do and do not. They are the CPU with a fault each.
#include "base/status.h"
#include "check.h"
#include "plan/device-probe.h"

#include "llama-graph.h" // llm_ffn_op_type

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

static constexpr int N_EMBD = 64, N_FF = 96, N_EXPERT = 4, N_USED = 3;

struct layer_fixture {
    spac_moe_layer        layer;
    ggml_context *        ctx = ggml_init({ 8 * ggml_tensor_overhead(), nullptr, true });
    ggml_backend_buffer_t buffer;

    explicit layer_fixture(int n_used) {
        layer.il                      = 0;
        layer.n_embd                  = N_EMBD;
        layer.n_expert                = N_EXPERT;
        layer.n_expert_used           = n_used;
        layer.op                      = LLM_FFN_SILU;
        layer.group                   = 0;
        layer.parts[SPAC_PART_UP]     = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, N_EMBD, N_FF, N_EXPERT);
        layer.parts[SPAC_PART_GATE]   = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, N_EMBD, N_FF, N_EXPERT);
        layer.parts[SPAC_PART_DOWN]   = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, N_FF, N_EMBD, N_EXPERT);
        layer.parts[SPAC_PART_DOWN_B] = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N_EMBD, N_EXPERT);
        buffer                        = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());

        std::mt19937                    rng(3);
        std::normal_distribution<float> normal(0, 0.1f);
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            std::vector<float> values(ggml_nelements(t));
            for (float & v : values) {
                v = normal(rng);
            }
            std::vector<char> bytes(ggml_nbytes(t));
            ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
            ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
        }
    }

    ~layer_fixture() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

enum class fault { NONE,
                   SKIPS_ROWS,   // leaves the row of an absent expert as it was, as llama.cpp's tiled Vulkan shaders do
                   FIRST_EXPERT, // takes expert 0 for it
                   ADDS_BIAS,    // knows of -1 only in MUL_MAT_ID
                   NO_ADD_ID,    // says that it cannot
                   NO_CUSTOM,    // the same of functions of the host
                   NO_CALLS };   // takes them, and does not call them

static fault the_fault;

static bool has_ids(const ggml_tensor * t) {
    return t->op == GGML_OP_MUL_MAT_ID || t->op == GGML_OP_ADD_ID;
}

// one node after the other on the CPU, with the fault
static ggml_status compute(ggml_backend_t, ggml_cgraph * gf) {
    ggml_backend_t cpu = ggml_backend_cpu_init();
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        ggml_tensor *        node = ggml_graph_node(gf, i);
        ggml_tensor *        ids  = has_ids(node) ? node->src[2] : nullptr;
        std::vector<int32_t> saved;
        std::vector<char>    before((char *) node->data, (char *) node->data + ggml_nbytes(node));
        if (ids) {
            int32_t * data = (int32_t *) ids->data;
            saved.assign(data, data + ggml_nelements(ids));
            const bool replaces = the_fault == fault::FIRST_EXPERT || (the_fault == fault::ADDS_BIAS && node->op == GGML_OP_ADD_ID);
            for (size_t k = 0; replaces && k < saved.size(); k++) {
                data[k] = std::max(0, data[k]);
            }
        }
        if (the_fault == fault::NO_CALLS && node->op == GGML_OP_CUSTOM) {
            continue;
        }
        ggml_cgraph one = ggml_graph_view(gf, i, i + 1);
        ggml_backend_graph_compute(cpu, &one);
        if (ids) {
            memcpy(ids->data, saved.data(), ggml_nbytes(ids));
        }
        for (size_t k = 0; the_fault == fault::SKIPS_ROWS && node->op == GGML_OP_MUL_MAT_ID && k < saved.size(); k++) {
            if (saved[k] < 0) {
                memcpy((char *) node->data + k * node->nb[1], before.data() + k * node->nb[1], node->nb[1]);
            }
        }
    }
    ggml_backend_free(cpu);
    return GGML_STATUS_SUCCESS;
}

struct fake_device {
    ggml_backend_t      real = ggml_backend_cpu_init();
    ggml_backend_device device;

    fake_device() :
        device(*ggml_backend_get_device(real)) {
        device.iface.get_name    = [](ggml_backend_dev_t) { return "FAKE0"; };
        device.iface.supports_op = [](ggml_backend_dev_t, const ggml_tensor * op) {
            return !(the_fault == fault::NO_ADD_ID && op->op == GGML_OP_ADD_ID) && !(the_fault == fault::NO_CUSTOM && op->op == GGML_OP_CUSTOM);
        };
        device.iface.init_backend = [](ggml_backend_dev_t dev, const char *) {
            ggml_backend_t backend       = ggml_backend_cpu_init();
            backend->device              = dev;
            backend->iface.graph_compute = compute;
            return backend;
        };
    }

    ~fake_device() { ggml_backend_free(real); }
};

static std::string refusal(fault f, int n_used, int max_batch) {
    the_fault = f;
    fake_device         fake;
    const layer_fixture fixture(n_used);
    try {
        spac_probe_device(&fake.device, fixture.layer, max_batch);
    } catch (const spac_error & error) {
        CHECK(error.status == SPAC_STATUS_DEVICE);
        return error.what();
    }
    return "";
}

static bool runs_host_functions(fault f) {
    the_fault = f;
    fake_device fake;
    return spac_runs_host_functions(&fake.device);
}

// a backend whose kernels read out of bounds is not even tried
static void test_other_backends() {
    ggml_backend_reg reg = *ggml_backend_cpu_reg();
    for (const char * name : { "MTL", "SYCL", "OpenCL" }) {
        static const char * the_name;
        the_name           = name;
        reg.iface.get_name = [](ggml_backend_reg_t) { return the_name; };
        fake_device fake;
        fake.device.reg                = &reg;
        fake.device.iface.init_backend = [](ggml_backend_dev_t, const char *) -> ggml_backend_t { abort(); };
        const layer_fixture fixture(N_USED);
        std::string         text;
        try {
            spac_probe_device(&fake.device, fixture.layer, 1);
        } catch (const spac_error & error) {
            text = error.what();
        }
        CHECK(text.find(std::string("FAKE0 is a device of ggml's backend ") + name) == 0);
    }
}

int main() {
    CHECK(runs_host_functions(fault::NONE));
    CHECK(!runs_host_functions(fault::NO_CUSTOM));
    CHECK(!runs_host_functions(fault::NO_CALLS));
    test_other_backends();
    for (const int n_used : { 1, 2, N_USED }) {
        for (const int max_batch : { 1, 5, 32 }) {
            CHECK(refusal(fault::NONE, n_used, max_batch).empty());
            CHECK(refusal(fault::SKIPS_ROWS, n_used, max_batch).find("FAKE0 computes wrongly") == 0);
            CHECK(refusal(fault::FIRST_EXPERT, n_used, max_batch).find("MUL_MAT_ID") != std::string::npos);
            CHECK(refusal(fault::ADDS_BIAS, n_used, max_batch).find("FFN") != std::string::npos);
            CHECK(refusal(fault::NO_ADD_ID, n_used, max_batch).find("FAKE0 does not support ADD_ID") == 0);
        }
    }
    return 0;
}
