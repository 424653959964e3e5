// Cache sizes as text; the size of the pool against the memory of a device, a fake one with 2 GiB free and a pinned type of its own; names of
// devices; ranges of cores.
#include "check.h"

#include "base/cpus.h"
#include "base/engine-params.h"
#include "base/status.h"
#include "cache/slot-pool.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <cstring>
#include <string>

static constexpr uint64_t MIB = 1 << 20, FREE_MIB = 2048;

static ggml_backend_device fake_device(enum ggml_backend_dev_type (*type)(ggml_backend_dev_t)) {
    ggml_backend_device device        = {};
    device.iface.get_name             = [](ggml_backend_dev_t) { return "FAKE0"; };
    device.iface.get_type             = type;
    device.iface.get_memory           = [](ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = FREE_MIB * MIB; };
    device.iface.get_host_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
    return device;
}

static std::string refusal(const char * cache, uint64_t guard_mib, ggml_backend_dev_t device) {
    try {
        spac_parse_cache(cache, 100 * FREE_MIB * MIB, guard_mib * MIB, device);
    } catch (const spac_error & error) {
        return error.what();
    }
    return "";
}

static void test_margin() {
    ggml_backend_device gpu = fake_device([](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; });
    ggml_backend_device cpu = fake_device([](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_CPU; });

    CHECK(spac_parse_cache("1792", 100 * FREE_MIB * MIB, 0, &gpu) == 1792 * MIB); // leaves 256
    CHECK(refusal("0", 0, &gpu).find("cannot be \"0\" with the device FAKE0") != std::string::npos);
    CHECK(refusal("1793", 0, &gpu).find("2048 MiB free, of which 256 MiB have to stay free") != std::string::npos);
    CHECK(!refusal("1792", 1, &gpu).empty()); // no room for the guard slot
    CHECK(!refusal("1%", 0, &gpu).empty());
    CHECK(spac_parse_cache("2048", 100 * FREE_MIB * MIB, 0, &cpu) == 2048 * MIB);
    CHECK(spac_parse_cache("auto", 100 * FREE_MIB * MIB, 4 * MIB, &gpu) == (2048 - 768 - 4) * MIB);
    CHECK(spac_parse_cache("auto", 100 * MIB, 4 * MIB, &gpu) == 100 * MIB);
}

static std::string refused_size(const char * text) {
    try {
        spac_size_bytes("a size", text, 100 * MIB);
    } catch (const spac_error & error) {
        CHECK(error.status == SPAC_STATUS_INVALID_ARGUMENT);
        return error.what();
    }
    return "";
}

static void test_sizes() {
    CHECK(spac_size_bytes("a size", "auto", 100 * MIB) == UINT64_MAX);
    CHECK(spac_size_bytes("a size", "12.5%", 100 * MIB) == 25 * MIB / 2);
    CHECK(spac_size_bytes("a size", "100%", 100 * MIB) == 100 * MIB);
    CHECK(spac_size_bytes("a size", "0.5", 100 * MIB) == MIB / 2);
    CHECK(spac_size_bytes("a size", "4096", 100 * MIB) == 4096 * MIB); // as asked for: more than there are
    CHECK(spac_size_bytes("a size", "0", 100 * MIB) == 0 && spac_size_bytes("a size", "0%", 100 * MIB) == 0);
    for (const char * text : { "8192", "8192M", "8192MiB", "8G", "8gb", "8.0GiB", "8589934592B" }) {
        CHECK(spac_size_bytes("a size", text, 100 * MIB) == 8192 * MIB);
    }
    for (const char * text : { "G", "8T", "8 G", "8k", "", "%", "17x", "-1", "+1", "1e3", "0x10", "inf", "nan", "1.", ".5", " 5", "5 ", "17%%", "100.1%", "1e10", "2000000000" }) {
        CHECK(refused_size(text).find(spac_format("a size %s is no size: give MiB", text)) != std::string::npos);
    }
}

static void test_pinned() {
    ggml_backend_device     gpu    = fake_device([](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; });
    ggml_backend_buffer_t   pinned = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 64);
    alignas(64) static char memory[64];
    ggml_backend_buffer_t   other = ggml_backend_cpu_buffer_from_ptr(memory, sizeof(memory)); // as mapped weights are
    CHECK(spac_is_pinned(pinned, &gpu));
    CHECK(!spac_is_pinned(other, &gpu));
    gpu.iface.get_host_buffer_type = nullptr;
    CHECK(spac_is_pinned(other, &gpu));
    ggml_backend_buffer_free(pinned);
    ggml_backend_buffer_free(other);
}

static void test_slots() {
    CHECK(spac_divide_slots(UINT64_MAX / 2, { 1, 1 }, { 100000, 10 }) == (std::vector<int32_t>{ 65534, 10 }));
}

// CUDA counts the blocks of Q4_0, of all rows and slots, in 32 bits; half floats in 64
static void test_max_slots() {
    ggml_context *           ctx = ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true });
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    spac_moe_layer           layer;
    layer.parts[SPAC_PART_DOWN] = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 2880, 2880, 1);
    CHECK(spac_max_slots(layer, cpu) == 65534);
    layer.parts[SPAC_PART_UP] = ggml_new_tensor_3d(ctx, GGML_TYPE_Q4_0, 2880, 2880, 1);
    const uint64_t n_blocks   = 2880 * 2880 / 32;
    CHECK((spac_max_slots(layer, cpu) + 1) * n_blocks <= INT32_MAX); // with the guard slot
    CHECK((spac_max_slots(layer, cpu) + 2) * n_blocks > INT32_MAX);
    ggml_free(ctx);
}

static size_t largest_tensor; // that the device below computes with, in bytes

static bool is_small(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_nbytes(op->src[0]) <= largest_tensor;
}

// as Vulkan does beyond maxStorageBufferRange: the largest part decides, its guard slot counted
static void test_max_slots_of_device() {
    ggml_context * ctx = ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true });
    spac_moe_layer layer;
    layer.parts[SPAC_PART_DOWN]   = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 32, 64, 1);
    layer.parts[SPAC_PART_UP]     = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, 64, 64, 1);
    layer.parts[SPAC_PART_DOWN_B] = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 1);
    ggml_backend_device device    = fake_device([](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; });
    device.iface.supports_op      = is_small;

    const size_t up_bytes = layer.part_bytes(SPAC_PART_UP);
    for (const size_t n : { 2, 3, 10, 1000 }) {
        largest_tensor = n * up_bytes;
        CHECK(spac_max_slots(layer, &device) == n - 1);
        largest_tensor = n * up_bytes + up_bytes / 2;
        CHECK(spac_max_slots(layer, &device) == n - 1);
    }
    largest_tensor = 0; // no expert at all: the probe of the device says so
    CHECK(spac_max_slots(layer, &device) == 65534);
    ggml_free(ctx);
}

static std::string refused_device(const std::string & name, const std::vector<ggml_backend_dev_t> & devices) {
    try {
        spac_choose_devices(name, devices);
    } catch (const spac_error & error) {
        CHECK(error.status == SPAC_STATUS_DEVICE);
        return error.what();
    }
    return "";
}

// without a GPU "auto" is none: the CPU plays a device only where it is asked for by name
static void test_devices() {
    ggml_backend_device gpu = fake_device([](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }), other = gpu;
    ggml_backend_device cpu  = fake_device([](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_CPU; });
    ggml_backend_device blas = fake_device([](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; });
    gpu.iface.get_name       = [](ggml_backend_dev_t) { return "CUDA0"; };
    other.iface.get_name     = [](ggml_backend_dev_t) { return "CUDA1"; };
    cpu.iface.get_name       = [](ggml_backend_dev_t) { return "CPU"; };

    const auto are = [](const std::string & names, const std::vector<ggml_backend_dev_t> & devices, const std::vector<ggml_backend_dev_t> & chosen) {
        return spac_choose_devices(names, devices) == chosen;
    };
    CHECK(are("auto", { &cpu, &blas }, {}));
    CHECK(are("auto", { &gpu, &blas, &cpu }, { &gpu }));
    CHECK(are("auto", { &gpu, &other, &cpu }, { &gpu, &other }));
    CHECK(spac_choose_devices("auto", std::vector<ggml_backend_dev_t>(SPAC_N_DEVICES, &gpu)).size() == SPAC_N_DEVICES - 1);
    for (const char * name : { "none", "None" }) {
        CHECK(are(name, { &gpu, &cpu }, {}));
    }
    for (const char * name : { "emulated", "cpu", "CPU" }) {
        CHECK(are(name, { &gpu, &cpu }, { &cpu }));
    }
    CHECK(are("cuda1", { &gpu, &other, &cpu }, { &other }));
    CHECK(refused_device("CUDA1", { &gpu, &cpu }).find("no device \"CUDA1\" here: give auto, none, CUDA0 or emulated") != std::string::npos);

    CHECK(are("CUDA1,cuda0", { &gpu, &other, &cpu }, { &other, &gpu }));
    CHECK(are("CUDA0,emulated", { &gpu, &other, &cpu }, { &gpu, &cpu }));
    CHECK(refused_device("CUDA0,cuda0", { &gpu, &cpu }).find("names CUDA0 twice") != std::string::npos);
    CHECK(refused_device("CUDA0,", { &gpu, &cpu }).find("no device \"\" here") != std::string::npos);
    for (const char * names : { "CUDA0,auto", "none,CUDA0" }) {
        CHECK(refused_device(names, { &gpu, &cpu }).find("cannot be in a list") != std::string::npos);
    }
}

// a device of the machine, as ggml describes it
struct machine_device : ggml_backend_device {
    const char *     id;
    ggml_backend_reg backend = {};
    const char *     backend_name;

    machine_device(const char * backend_name, const char * id, enum ggml_backend_dev_type (*type)(ggml_backend_dev_t)) :
        ggml_backend_device(fake_device(type)), id(id), backend_name(backend_name) {
        iface.get_props        = [](ggml_backend_dev_t device, ggml_backend_dev_props * props) { props->device_id = ((machine_device *) device)->id; };
        backend.context        = this;
        backend.iface.get_name = [](ggml_backend_reg_t reg) { return ((machine_device *) reg->context)->backend_name; };
        reg                    = &backend;
    }
};

// llama.cpp's rule
static void test_gpus_of_machine() {
    const auto     dedicated  = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    const auto     integrated = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_IGPU; };
    machine_device cuda0("CUDA", "0000:01:00.0", dedicated), cuda1("CUDA", "0000:02:00.0", dedicated);
    machine_device same("Vulkan", "0000:01:00.0", dedicated), more("Vulkan", "0000:03:00.0", dedicated);
    machine_device nameless("Vulkan", nullptr, dedicated), nameless_too("Vulkan", nullptr, dedicated);
    machine_device inside("Vulkan", "0000:00:02.0", integrated), inside_too("Vulkan", "0000:00:03.0", integrated), inside_sycl("SYCL", "0000:00:02.0", integrated);
    machine_device rpc("RPC[127.0.0.1:50052]", nullptr, dedicated);
    machine_device cpu("CPU", nullptr, [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_CPU; });
    machine_device blas("BLAS", nullptr, [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; });
    using list     = std::vector<ggml_backend_dev_t>;
    inside_too.reg = inside.reg;
    CHECK(spac_gpus_of_machine({ &blas, &cpu }).empty());
    CHECK((spac_gpus_of_machine({ &cuda0, &cuda1, &same, &more, &cpu }) == list{ &cuda0, &cuda1, &more }));
    CHECK((spac_gpus_of_machine({ &nameless, &nameless_too, &cpu }) == list{ &nameless, &nameless_too })); // no two are known to be one
    CHECK((spac_gpus_of_machine({ &inside, &cuda0, &cpu }) == list{ &cuda0 }));
    CHECK((spac_gpus_of_machine({ &inside, &inside_sycl, &inside_too, &rpc, &cpu }) == list{ &inside, &inside_too }));
    CHECK((spac_gpus_of_machine({ &rpc, &cuda1 }) == list{ &cuda1 }));
}

static void test_sizes_of_devices() {
    CHECK(spac_cache_sizes("25%", 1) == std::vector<std::string>{ "25%" });
    CHECK((spac_cache_sizes("25%", 2) == std::vector<std::string>{ "25%", "25%" }));
    CHECK((spac_cache_sizes("8000,auto", 2) == std::vector<std::string>{ "8000", "auto" }));
    for (const size_t n : { 1, 3 }) {
        try {
            spac_cache_sizes("8000,4000", n);
            CHECK(false);
        } catch (const spac_error & error) {
            CHECK(error.status == SPAC_STATUS_INVALID_ARGUMENT && strstr(error.what(), n == 1 ? "has 2 sizes, and there is one device" : "are 3 devices"));
        }
    }
}

static void test_no_cache_without_a_device() {
    spac_check_no_cache("auto");
    spac_check_no_cache("0");
    for (const char * text : { "25%", "4096", "0.1" }) {
        try {
            spac_check_no_cache(text);
            CHECK(false);
        } catch (const spac_error & error) {
            CHECK(error.status == SPAC_STATUS_INVALID_ARGUMENT && strstr(error.what(), "needs a device, and there is none"));
        }
    }
}

static bool is_refused(const std::string & cpu_range) {
    try {
        spac_parse_cpu_range(cpu_range);
    } catch (const spac_error & error) {
        CHECK(std::string(error.what()).find('"' + cpu_range + '"') != std::string::npos);
        return error.status == SPAC_STATUS_INVALID_ARGUMENT;
    }
    return false;
}

static void test_cpu_range() {
    const std::vector<int> open  = spac_open_cpus();
    const std::string      first = std::to_string(open.front());
    CHECK(spac_parse_cpu_range(first + "-" + first) == std::vector<int>{ open.front() });
    CHECK(is_refused(first + "-" + std::to_string(open.back() + 1)));
    for (const char * text : { "", "0", "-", "0-", "-1", "1-0", "0--1", "0-0x", " 0-0", "0-0,1", "0-512", "0-99999999999" }) {
        CHECK(is_refused(text));
    }
}

int main() {
    test_margin();
    test_sizes();
    test_pinned();
    test_slots();
    test_max_slots();
    test_max_slots_of_device();
    test_devices();
    test_gpus_of_machine();
    test_sizes_of_devices();
    test_no_cache_without_a_device();
    test_cpu_range();
    return 0;
}
