#include "engine-params.h"

#include "cpus.h"
#include "status.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <limits>
#include <locale>
#include <numeric>
#include <sstream>
#include <strings.h>

static_assert(SPAC_MAX_THREADS == GGML_MAX_N_THREADS, "spac.h has to follow ggml.h");

static constexpr uint64_t MIB               = 1 << 20;
static constexpr uint64_t AUTO_MARGIN_BYTES = SPAC_AUTO_MARGIN_MIB * MIB, MIN_MARGIN_BYTES = SPAC_MIN_MARGIN_MIB * MIB;
static constexpr double   MAX_SIZE_MIB = 1e9; // more than that is a slip

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

// digits, and a fraction if there is a point: no sign, no exponent
static bool is_number(const std::string & text) {
    static const char * const digits = "0123456789";
    const size_t              point  = text.find_first_not_of(digits);
    if (point == std::string::npos) {
        return !text.empty();
    }
    return point > 0 && text[point] == '.' && point + 1 < text.size() && text.find_first_not_of(digits, point + 1) == std::string::npos;
}

// a stream, as strtod would ask the program's locale for the point
bool spac_read_number(const std::string & text, double lowest, double highest, double & number) {
    std::istringstream stream(text);
    stream.imbue(std::locale::classic());
    return stream >> number && stream.eof() && number >= lowest && number <= highest;
}

// -1: it is none
static double read_number(const std::string & text) {
    double value = -1.0;
    return is_number(text) && spac_read_number(text, 0, std::numeric_limits<double>::max(), value) ? value : -1.0;
}

uint64_t spac_size_bytes(const char * name, const std::string & text, uint64_t total_bytes) {
    if (text == "auto") {
        return UINT64_MAX;
    }
    const size_t      end    = text.find_first_not_of("0123456789.");
    const std::string number = text.substr(0, end), unit = end == std::string::npos ? "M" : text.substr(end);
    const auto        is     = [&](const char * other) { return strcasecmp(unit.c_str(), other) == 0; };
    const bool        is_gib = is("G") || is("GB") || is("GiB"), is_mib = is("M") || is("MB") || is("MiB");
    const double      scale = is("%") ? total_bytes / 100.0 : is_gib ? 1024.0 * MIB
                                                          : is_mib   ? MIB
                                                                     : 1.0;
    const double      value = read_number(number);
    if (value < 0 || (is("%") ? value > 100.0 : value * scale > MAX_SIZE_MIB * MIB) || !(is("%") || is_gib || is_mib || is("B"))) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s %s is no size: give MiB (8000), GiB (8G), a share of all experts (25%%), or auto", name, text.c_str()));
    }
    return (uint64_t) (value * scale + (is("%") ? 0.5 : 0.0));
}

uint64_t spac_parse_cache(const std::string & text, uint64_t total_bytes, uint64_t guard_bytes, ggml_backend_dev_t device) {
    size_t free_bytes = 0, all_bytes = 0;
    ggml_backend_dev_memory(device, &free_bytes, &all_bytes);

    const uint64_t asked = spac_size_bytes("cache", text, total_bytes);
    if (asked == UINT64_MAX) {
        return auto_bytes(total_bytes, guard_bytes, device, free_bytes);
    }
    if (asked == 0) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("the cache size cannot be \"%s\" with the device %s: give more than 0, or no device",
                                     text.c_str(), ggml_backend_dev_name(device)));
    }
    const uint64_t bytes  = std::min(asked, total_bytes);
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

static std::vector<std::string> split_at_commas(const std::string & text) {
    std::vector<std::string> parts(1);
    for (const char c : text) {
        if (c == ',') {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}

std::vector<std::string> spac_cache_sizes(const std::string & text, size_t n_devices) {
    std::vector<std::string> sizes = split_at_commas(text);
    if (sizes.size() == 1) {
        sizes.resize(n_devices, text);
    }
    if (sizes.size() != n_devices) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("cache \"%s\" has %zu sizes, and there %s: give one for each, or one for all",
                                                                   text.c_str(), sizes.size(),
                                                                   n_devices == 1 ? "is one device" : spac_format("are %zu devices", n_devices).c_str()));
    }
    return sizes;
}

void spac_check_no_cache(const std::string & text) {
    const uint64_t asked = spac_size_bytes("cache", text, UINT64_MAX / 2);
    if (asked != UINT64_MAX && asked != 0) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("cache \"%s\" needs a device, and there is none: leave it out, or name a device (\"emulated\" tries "
                                     "the split on the CPU)",
                                     text.c_str()));
    }
}

// ---- devices

static const std::string EMULATED = "emulated";

double spac_emulated_speed(const std::string & name) {
    const size_t n = EMULATED.size();
    if (strncasecmp(name.c_str(), (EMULATED + ":").c_str(), n + 1) != 0) {
        return 0;
    }
    const double speed = read_number(name.substr(n + 1));
    if (!(speed >= SPAC_EMULATED_MIN && speed <= SPAC_EMULATED_MAX)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, spac_format("device \"%s\": give a speed from %g to %g, of the host's, such as emulated:0.3; and no other device",
                                                                   name.c_str(), SPAC_EMULATED_MIN, SPAC_EMULATED_MAX));
    }
    return speed;
}

spac_device_kind spac_read_device(const std::string & name) {
    const auto is = [&](const char * other) { return strcasecmp(name.c_str(), other) == 0; };
    return is("auto") ? SPAC_DEVICE_AUTO : is("none")                                                 ? SPAC_DEVICE_NONE
                                       : is("emulated") || is("cpu") || spac_emulated_speed(name) > 0 ? SPAC_DEVICE_EMULATED
                                                                                                      : SPAC_DEVICE_NAMED;
}

static bool is_gpu(ggml_backend_dev_t device) {
    return !spac_device_is_cpu(device) && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static std::string names_of(const std::vector<ggml_backend_dev_t> & devices) {
    std::string names;
    for (ggml_backend_dev_t device : devices) {
        names += (names.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(device));
    }
    return names;
}

static std::vector<ggml_backend_dev_t> gpus_of(const std::vector<ggml_backend_dev_t> & devices) {
    std::vector<ggml_backend_dev_t> gpus;
    std::copy_if(devices.begin(), devices.end(), std::back_inserter(gpus), is_gpu);
    return gpus;
}

static ggml_backend_dev_t find_device(const std::string & name, const std::vector<ggml_backend_dev_t> & devices) {
    const std::vector<ggml_backend_dev_t> gpus = gpus_of(devices);
    const spac_device_kind                kind = spac_read_device(name);
    if (kind == SPAC_DEVICE_AUTO || kind == SPAC_DEVICE_NONE) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("the device \"%s\" cannot be in a list: leave it out, or the others", name.c_str()));
    }
    for (ggml_backend_dev_t device : devices) {
        const bool is_named = strcasecmp(name.c_str(), ggml_backend_dev_name(device)) == 0;
        if (is_named || (kind == SPAC_DEVICE_EMULATED && spac_device_is_cpu(device))) {
            return device;
        }
    }
    throw spac_error(SPAC_STATUS_DEVICE, spac_format("there is no device \"%s\" here: give auto, none%s%s or emulated", name.c_str(),
                                                     gpus.empty() ? "" : ", ", names_of(gpus).c_str()));
}

// ggml's scheduler has 16 backends (GGML_SCHED_MAX_BACKENDS, ggml-backend.cpp), and one is the CPU's
static const size_t N_DEVICES_MAX = SPAC_N_DEVICES - 1;

static bool is_rpc(ggml_backend_dev_t device) {
    return std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device))).rfind("RPC", 0) == 0; // RPC[host:port]
}

static bool is_same_gpu(ggml_backend_dev_t a, ggml_backend_dev_t b) {
    ggml_backend_dev_props of_a = {}, of_b = {};
    ggml_backend_dev_get_props(a, &of_a);
    ggml_backend_dev_get_props(b, &of_b);
    return of_a.device_id && of_b.device_id && strcmp(of_a.device_id, of_b.device_id) == 0;
}

std::vector<ggml_backend_dev_t> spac_gpus_of_machine(const std::vector<ggml_backend_dev_t> & devices) {
    std::vector<ggml_backend_dev_t> dedicated, integrated;
    for (ggml_backend_dev_t device : devices) {
        if (!is_gpu(device) || is_rpc(device)) {
            continue;
        }
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_IGPU) {
            if (integrated.empty() || ggml_backend_dev_backend_reg(device) == ggml_backend_dev_backend_reg(integrated.front())) {
                integrated.push_back(device);
            }
        } else if (std::none_of(dedicated.begin(), dedicated.end(), [&](ggml_backend_dev_t other) { return is_same_gpu(device, other); })) {
            dedicated.push_back(device);
        }
    }
    return dedicated.empty() ? integrated : dedicated;
}

std::vector<ggml_backend_dev_t> spac_choose_devices(const std::string & names, const std::vector<ggml_backend_dev_t> & devices) {
    const spac_device_kind kind = spac_read_device(names);
    if (kind == SPAC_DEVICE_NONE) {
        return {};
    }
    if (kind == SPAC_DEVICE_AUTO) {
        std::vector<ggml_backend_dev_t> gpus = gpus_of(devices);
        gpus.resize(std::min<size_t>(gpus.size(), N_DEVICES_MAX));
        return gpus;
    }
    std::vector<ggml_backend_dev_t> chosen;
    for (const std::string & name : split_at_commas(names)) {
        if (spac_emulated_speed(name) > 0 && name != names) {
            throw spac_error(SPAC_STATUS_DEVICE, spac_format("the device \"%s\" cannot be in a list: leave out its speed, or the others", name.c_str()));
        }
        ggml_backend_dev_t device = find_device(name, devices);
        if (std::find(chosen.begin(), chosen.end(), device) != chosen.end()) {
            throw spac_error(SPAC_STATUS_DEVICE, spac_format("--device \"%s\" names %s twice: name each device once", names.c_str(), ggml_backend_dev_name(device)));
        }
        chosen.push_back(device);
    }
    if (chosen.size() > N_DEVICES_MAX) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("--device names %zu devices: name %zu at most", chosen.size(), N_DEVICES_MAX));
    }
    return chosen;
}

// the numbers from the first to the last; none if it is no range
static std::vector<int> read_range(const std::string & text) {
    int          low = 0, high = 0;
    const char * end   = text.data() + text.size();
    const auto   first = std::from_chars(text.data(), end, low);
    if (first.ec != std::errc() || first.ptr == end || *first.ptr != '-') {
        return {};
    }
    const auto second = std::from_chars(first.ptr + 1, end, high);
    if (second.ec != std::errc() || second.ptr != end || low < 0 || high < low || high >= SPAC_MAX_THREADS) {
        return {};
    }
    std::vector<int> range(high - low + 1);
    std::iota(range.begin(), range.end(), low);
    return range;
}

std::vector<int> spac_parse_cpu_range(const std::string & text) {
    const std::vector<int> open = spac_open_cpus(), cpus = read_range(text);
    if (cpus.empty() || !std::includes(open.begin(), open.end(), cpus.begin(), cpus.end())) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("the cpu range cannot be \"%s\": give the first and the last core, such as 0-7, of the %zu cores "
                                     "that are open to this process, from %d to %d",
                                     text.c_str(), open.size(), open.front(), open.back()));
    }
    return cpus;
}

static std::string or_else(const char * text, const char * fallback) {
    return text ? text : fallback;
}

spac_settings::spac_settings(const spac_engine_params & params) :
    params(params), device(or_else(params.device, "auto")), cache(or_else(params.cache, "auto")), board_name(or_else(params.board_name, "")),
    lossy(or_else(params.lossy, "")), baseline(or_else(params.baseline, "")),
    cpus(params.cpu_range ? spac_parse_cpu_range(params.cpu_range) : std::vector<int>()) {}
