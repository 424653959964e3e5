#include "plan.h"

#include "base/status.h"
#include "cache/baseline.h"
#include "cache/slot-pool.h"
#include "device-probe.h"
#include "host/host-experts.h"

#include <algorithm>
#include <numeric>

// of a dense model the hook shows no layer, and with it no device: the weights tell
static std::vector<ggml_backend_dev_t> choose_for_dense(const std::string & name, const spac_layers & layers) {
    const spac_device_kind kind = spac_read_device(name);
    if (kind == SPAC_DEVICE_NONE || (kind == SPAC_DEVICE_AUTO && layers.is_on_host)) {
        return {};
    }
    throw spac_dense_model();
}

static void choose_device(spac_plan & plan, const spac_settings & settings, const spac_layers & layers) {
    const bool is_dense = layers.by_il.empty();
    plan.devices        = is_dense ? choose_for_dense(settings.device, layers) : spac_choose_devices(settings.device, layers.devices);
    plan.has_slots      = !plan.devices.empty();
    plan.speed          = spac_emulated_speed(settings.device);
    if (!plan.has_slots) {
        spac_check_no_cache(settings.cache);
        plan.devices = { ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) };
    }
    plan.places.resize(plan.devices.size());
    std::iota(plan.places.begin(), plan.places.end(), size_t(0));
}

// Each of several named devices has to hold something; of those that "auto" finds, some may be empty.
static void assign_layers(spac_plan & plan, spac_layers & layers, bool is_auto) {
    const std::vector<bool> has_layer = layers.assign(plan.devices);
    for (size_t d = plan.devices.size(); d-- > 0 && plan.devices.size() > 1;) {
        if (has_layer[d]) {
            continue;
        }
        const std::string text = spac_format("llama.cpp gives %s no MoE layer of this model", ggml_backend_dev_name(plan.devices[d]));
        if (!is_auto) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, text + ": leave it out of --device, or give it a larger share with --tensor-split (the "
                                                                  "output is shared out as one layer more)");
        }
        spac_log("%s: it holds no experts", text.c_str());
        plan.devices.erase(plan.devices.begin() + d);
        plan.places.erase(plan.places.begin() + d);
    }
    layers.assign(plan.devices);
}

static std::string names_of(const spac_plan & plan) {
    std::string names;
    for (ggml_backend_dev_t device : plan.devices) {
        names += (names.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(device));
    }
    return names;
}

static void choose_kernels(spac_plan & plan, const spac_engine_params & params, bool is_on_disk) {
    if (!plan.has_slots && (params.host_kernels == SPAC_KERNELS_GGML || params.host_mode == SPAC_HOST_EXECUTOR)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "device \"none\" runs all experts in the graph, with the engine's own kernels: "
                                                       "it needs host_kernels auto or spac, and host_mode auto or in-graph");
    }
    if (is_on_disk && params.host_kernels == SPAC_KERNELS_GGML) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "ggml's kernels cannot compute experts that are on disk (ram): give host_kernels auto or spac");
    }
    const bool is_auto   = params.host_kernels == SPAC_KERNELS_AUTO && (!plan.has_slots || !plan.device_is_cpu() || plan.speed > 0 || is_on_disk);
    const bool is_wanted = params.host_kernels == SPAC_KERNELS_SPAC || is_auto;
    plan.kernels         = is_wanted ? spac_kernels_best() : nullptr;
    if (is_wanted && !plan.kernels) {
        spac_log("no kernels for this processor (they need AVX2, FMA and F16C; on ARM the dot product of bytes): ggml's are used");
    }
}

static void give_kernels_to_layers(const spac_plan & plan, spac_layers & layers, bool is_on_disk) {
    const bool had_any = layers.any_split();
    for (auto & [il, layer] : layers.by_il) {
        layer.own_kernels = layer.is_split() && plan.kernels && spac_host_experts::can_compute(*plan.kernels, layer, is_on_disk);
        if (layer.is_split() && (!plan.has_slots || is_on_disk) && !layer.own_kernels) {
            layer.declined = "the engine has no kernels for it";
        }
    }
    if (had_any && !layers.any_split()) {
        spac_log("the engine has no kernels for the experts of this model on this machine: llama.cpp's compute them");
    }
}

// beside those of the pool
static void say_what_stays_mapped(const spac_layers & layers) {
    int         n = 0;
    std::string reason;
    for (const auto & [il, layer] : layers.by_il) {
        n += !layer.is_split();
        reason = layer.is_split() ? reason : layer.declined;
    }
    if (n > 0) {
        spac_log("the experts of %d layers are not held in the memory of ram: they stay in the mapped file, which the kernel reads page by page (%s)", n,
                 reason.c_str());
    }
}

// What the device calls and what the graph's thread calls would meet where a layer is the host's: then no call is the device's.
static bool can_call_from_stream(const spac_plan & plan, const spac_layers & layers) {
    for (const spac_moe_layer * layer : layers.split()) {
        const ggml_tensor * router = layer->router.weight;
        if (router && ggml_backend_buffer_is_host(router->buffer)) {
            return false;
        }
    }
    return std::all_of(plan.devices.begin(), plan.devices.end(), spac_runs_host_functions);
}

static void choose_host_mode(spac_plan & plan, int wanted, const spac_layers & layers) {
    const bool is_cpu = plan.device_is_cpu(), any_is_cpu = plan.any_is_cpu();
    if (plan.speed > 0 && wanted == SPAC_HOST_IN_GRAPH) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "an emulated device with a speed works beside the host: give host_mode auto or executor, or leave out the speed");
    }
    if (!plan.has_slots || (wanted == SPAC_HOST_AUTO && is_cpu && plan.speed == 0)) {
        plan.host_mode = SPAC_HOST_IN_GRAPH;
        return;
    }
    const bool in_stream = (wanted == SPAC_HOST_AUTO || wanted == SPAC_HOST_IN_STREAM) && !any_is_cpu && can_call_from_stream(plan, layers);
    if (wanted == SPAC_HOST_IN_STREAM && !in_stream) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s cannot call the engine from its stream, or some of the layers are not there: give host_mode auto or executor",
                                     names_of(plan).c_str()));
    }
    plan.host_mode = in_stream ? SPAC_HOST_IN_STREAM : wanted == SPAC_HOST_AUTO ? SPAC_HOST_EXECUTOR
                                                                                : wanted;
    if (plan.host_mode == SPAC_HOST_IN_GRAPH && !is_cpu) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("in-graph host experts need the CPU as the device, not %s", names_of(plan).c_str()));
    }
}

// of one device's layout groups
struct device_groups {
    std::vector<int>      groups;
    std::vector<uint64_t> bytes, n_experts; // of each group: of one expert; experts that may be resident
    uint64_t              total_bytes = 0;  // of all experts of its layers
};

static device_groups groups_of(const spac_plan & plan, const spac_layers & layers, size_t device) {
    device_groups found;
    for (size_t g = 0; g < layers.group_like.size(); g++) {
        const spac_moe_layer & like = *layers.group_like[g];
        if (like.device != (int) device) {
            continue;
        }
        uint64_t n_experts = 0;
        for (const spac_moe_layer * layer : layers.split()) {
            n_experts += layer->group == (int) g ? layer->n_expert : 0;
        }
        found.groups.push_back((int) g);
        found.bytes.push_back(like.expert_bytes());
        found.n_experts.push_back(std::min(n_experts, spac_max_slots(like, plan.devices[device])));
        found.total_bytes += n_experts * like.expert_bytes();
    }
    return found;
}

// n_asked: devices that were asked for, each of which may have a size of its own
static void divide_cache(spac_plan & plan, const std::string & cache_sizes, size_t n_asked, const spac_layers & layers) {
    plan.group_slots.assign(layers.group_like.size(), 0);
    if (!plan.has_slots) {
        return;
    }
    const std::vector<std::string> sizes = spac_cache_sizes(cache_sizes, n_asked);
    for (size_t d = 0; d < plan.devices.size(); d++) {
        const std::string &        size    = sizes[plan.places[d]];
        const device_groups        of      = groups_of(plan, layers, d);
        const uint64_t             guards  = std::accumulate(of.bytes.begin(), of.bytes.end(), uint64_t(0)); // one per group
        const uint64_t             budget  = spac_parse_cache(size, of.total_bytes, guards, plan.devices[d]);
        const std::vector<int32_t> n_slots = spac_divide_slots(budget, of.bytes, of.n_experts);
        for (size_t i = 0; i < n_slots.size(); i++) {
            if (n_slots[i] == 0) {
                const std::string where = n_slots.size() > 1 ? spac_format(" in each of %zu pools", n_slots.size()) : "";
                throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                                 spac_format("cache \"%s\" has no room for one expert of %.2f MiB%s: use at least %.0f MiB", size.c_str(),
                                             of.bytes[i] / 1048576.0, where.c_str(), of.bytes[i] / 1048576.0 * n_slots.size() + 1));
            }
            plan.group_slots[of.groups[i]] = n_slots[i];
        }
    }
}

// memory that is mapped, or that the driver refused to pin
static void find_unpinned(spac_plan & plan, const spac_layers & layers) {
    for (const spac_moe_layer * layer : layers.split()) {
        plan.n_layer_unpinned += !spac_is_pinned(layer->parts[SPAC_PART_DOWN]->buffer, plan.device_of(*layer));
    }
    if (plan.n_layer_unpinned > 0) {
        spac_log("experts of %d layers are not in memory that %s has pinned: copies are slower (load with --load-mode none; the "
                 "driver may also have refused it)",
                 plan.n_layer_unpinned, names_of(plan).c_str());
    }
}

// a device that does not know of id -1 computes wrongly, or reads where nothing is; the CPU backend is our own
static void probe_device(const spac_plan & plan, const spac_layers & layers, int max_batch) {
    for (const spac_moe_layer * layer : layers.group_like) {
        if (plan.has_slots && !spac_device_is_cpu(plan.device_of(*layer))) {
            spac_probe_device(plan.device_of(*layer), *layer, max_batch);
        }
    }
}

spac_plan spac_make_plan(const spac_settings & settings, spac_layers & layers) {
    const bool is_on_disk = settings.params.ram_bytes > 0;
    spac_plan  plan;
    choose_device(plan, settings, layers);
    const size_t n_asked = plan.devices.size();
    layers.check(plan.has_slots);
    choose_kernels(plan, settings.params, is_on_disk);
    give_kernels_to_layers(plan, layers, is_on_disk);
    assign_layers(plan, layers, spac_read_device(settings.device) == SPAC_DEVICE_AUTO);
    layers.form_groups(spac_baseline("baseline", settings.baseline).per_layer);
    choose_host_mode(plan, settings.params.host_mode, layers);
    divide_cache(plan, settings.cache, n_asked, layers);
    if (is_on_disk) {
        say_what_stays_mapped(layers);
    } else {
        find_unpinned(plan, layers);
    }
    probe_device(plan, layers, settings.params.max_batch);
    return plan;
}
