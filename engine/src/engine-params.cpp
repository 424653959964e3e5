#include "engine-params.h"

#include "cpus.h"
#include "status.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <strings.h>

static_assert(SPAC_MAX_THREADS == GGML_MAX_N_THREADS, "spac.h has to follow ggml.h");

// of the device's free memory: kept for what still grows (CUDA's modules and graphs, compute buffers) by "auto", and the
// least that a size given by hand has to leave
static constexpr uint64_t AUTO_MARGIN_BYTES = 768ull << 20, MIN_MARGIN_BYTES = 256ull << 20;
// share of the experts that "auto" holds where the device is the CPU: a second copy of all would gain nothing
static constexpr double AUTO_CPU_SHARE = 0.25;

bool spac_device_is_cpu(ggml_backend_dev_t device) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

bool spac_is_pinned(ggml_backend_buffer_t buffer, ggml_backend_dev_t device) {
    const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device);
    return !pinned || ggml_backend_buffer_get_type(buffer) == pinned;
}

static uint64_t auto_bytes(uint64_t total_bytes, uint64_t guard_bytes, ggml_backend_dev_t device, uint64_t free_bytes) {
    if (spac_device_is_cpu(device)) {
        return (uint64_t) (total_bytes * AUTO_CPU_SHARE);
    }
    if (free_bytes <= AUTO_MARGIN_BYTES + guard_bytes) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY,
                         spac_format("%s has %.0f MiB free, and --cache auto keeps %.0f MiB for compute buffers: free memory there or give --cache in MiB",
                                     ggml_backend_dev_name(device), free_bytes / 1048576.0, AUTO_MARGIN_BYTES / 1048576.0));
    }
    return std::min(total_bytes, free_bytes - AUTO_MARGIN_BYTES - guard_bytes);
}

uint64_t spac_parse_cache(const std::string & text, uint64_t total_bytes, uint64_t guard_bytes, ggml_backend_dev_t device) {
    size_t free_bytes = 0, all_bytes = 0;
    ggml_backend_dev_memory(device, &free_bytes, &all_bytes);

    if (text == "auto") {
        return auto_bytes(total_bytes, guard_bytes, device, free_bytes);
    }

    char *            end        = nullptr;
    const double      value      = strtod(text.c_str(), &end);
    const std::string unit       = end;
    const bool        is_percent = unit == "%";
    const bool        ok         = end != text.c_str() && value > 0 && (is_percent ? value <= 100 : unit.empty() && value < 1e9);
    if (!ok) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("cache \"%s\": give a share of the experts (17%%, up to 100%%), a number of MiB above 0, or auto", text.c_str()));
    }

    const uint64_t bytes  = is_percent ? (uint64_t) (value / 100 * total_bytes + 0.5) : std::min((uint64_t) (value * 1048576), total_bytes);
    const uint64_t margin = spac_device_is_cpu(device) ? 0 : MIN_MARGIN_BYTES;
    if (free_bytes > 0 && bytes + guard_bytes + margin > free_bytes) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY,
                         spac_format("cache \"%s\" takes %.0f MiB, but %s has %.0f MiB free, of which %.0f MiB have to stay free: "
                                     "use a smaller --cache, or auto",
                                     text.c_str(), (bytes + guard_bytes) / 1048576.0, ggml_backend_dev_name(device),
                                     free_bytes / 1048576.0, margin / 1048576.0));
    }
    return bytes;
}

ggml_backend_dev_t spac_choose_device(const std::string & name, const std::vector<ggml_backend_dev_t> & devices) {
    std::vector<ggml_backend_dev_t> gpus;
    ggml_backend_dev_t              cpu = nullptr;
    std::string                     names;
    for (ggml_backend_dev_t device : devices) {
        names += std::string(names.empty() ? "" : ", ") + ggml_backend_dev_name(device);
        if (spac_device_is_cpu(device)) {
            cpu = device;
        } else if (ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_ACCEL) {
            gpus.push_back(device);
        }
    }

    if (name == "auto") {
        if (gpus.size() > 1) {
            throw spac_error(SPAC_STATUS_DEVICE, spac_format("the model is spread over %zu devices (%s); one is supported: choose it with --device",
                                                             gpus.size(), names.c_str()));
        }
        return gpus.empty() ? cpu : gpus[0];
    }
    for (ggml_backend_dev_t device : devices) {
        const bool is_named = strcasecmp(name.c_str(), ggml_backend_dev_name(device)) == 0;
        if (is_named || (device == cpu && strcasecmp(name.c_str(), "cpu") == 0)) {
            return device;
        }
    }
    throw spac_error(SPAC_STATUS_DEVICE, spac_format("device \"%s\" is not used by this context, which has: %s", name.c_str(), names.c_str()));
}

static bool read_range(const std::string & text, int & low, int & high) {
    const char * end   = text.data() + text.size();
    const auto   first = std::from_chars(text.data(), end, low);
    if (first.ec != std::errc() || first.ptr == end || *first.ptr != '-') {
        return false;
    }
    const auto second = std::from_chars(first.ptr + 1, end, high);
    return second.ec == std::errc() && second.ptr == end && low >= 0 && low <= high && high < SPAC_MAX_THREADS;
}

std::vector<int> spac_parse_cpu_range(const std::string & text) {
    int low = 0, high = 0;
    if (!read_range(text, low, high)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("cpu_range \"%s\": give the first and the last core, such as 0-7, from 0 to %d", text.c_str(), SPAC_MAX_THREADS - 1));
    }
    const std::vector<int> open = spac_open_cpus();
    std::vector<int>       cpus;
    for (int cpu = low; cpu <= high; cpu++) {
        if (!std::binary_search(open.begin(), open.end(), cpu)) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                             spac_format("cpu_range \"%s\": core %d is not open to this process: give some of its %zu cores, from %d to %d",
                                         text.c_str(), cpu, open.size(), open.front(), open.back()));
        }
        cpus.push_back(cpu);
    }
    return cpus;
}

static std::string or_else(const char * text, const char * fallback) {
    return text ? text : fallback;
}

spac_settings::spac_settings(const spac_engine_params & params) :
    params(params), device(or_else(params.device, "auto")), cache(or_else(params.cache, "auto")), board_name(or_else(params.board_name, "")),
    cpus(params.cpu_range ? spac_parse_cpu_range(params.cpu_range) : std::vector<int>()) {}
