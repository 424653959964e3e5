#include "plan.h"

#include "device-probe.h"
#include "host/host-experts.h"
#include "slot-pool.h"
#include "status.h"

#include <algorithm>
#include <numeric>

// of a dense model the hook shows no layer, and with it no device: the weights tell
static ggml_backend_dev_t choose_for_dense(const std::string & name, const spac_layers & layers) {
    const spac_device_kind kind = spac_read_device(name);
    if (kind == SPAC_DEVICE_NONE || (kind == SPAC_DEVICE_AUTO && layers.is_on_host)) {
        return nullptr;
    }
    throw spac_dense_model();
}

static void choose_device(spac_plan & plan, const spac_settings & settings, const spac_layers & layers) {
    const bool is_dense = layers.by_il.empty();
    plan.device         = is_dense ? choose_for_dense(settings.device, layers) : spac_choose_device(settings.device, layers.devices);
    plan.has_slots      = plan.device != nullptr;
    if (!plan.has_slots) {
        spac_check_no_cache(settings.cache);
        plan.device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
}

static void choose_kernels(spac_plan & plan, const spac_engine_params & params, bool is_on_disk) {
    if (!plan.has_slots && (params.host_kernels == SPAC_KERNELS_GGML || params.host_mode == SPAC_HOST_EXECUTOR)) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "device \"none\" runs all experts in the graph, with the engine's own kernels: "
                                                       "it needs host_kernels auto or spac, and host_mode auto or in-graph");
    }
    if (is_on_disk && params.host_kernels == SPAC_KERNELS_GGML) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT, "ggml's kernels cannot compute experts that are on disk (ram): give host_kernels auto or spac");
    }
    const bool is_auto   = params.host_kernels == SPAC_KERNELS_AUTO && (!plan.has_slots || !plan.device_is_cpu() || is_on_disk);
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
    return spac_runs_host_functions(plan.device);
}

static void choose_host_mode(spac_plan & plan, int wanted, const spac_layers & layers) {
    const bool is_cpu = plan.device_is_cpu();
    if (!plan.has_slots || (wanted == SPAC_HOST_AUTO && is_cpu)) {
        plan.host_mode = SPAC_HOST_IN_GRAPH;
        return;
    }
    const bool in_stream = (wanted == SPAC_HOST_AUTO || wanted == SPAC_HOST_IN_STREAM) && !is_cpu && can_call_from_stream(plan, layers);
    if (wanted == SPAC_HOST_IN_STREAM && !in_stream) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("%s cannot call the engine from its stream, or some of the layers are not there: give host_mode auto or executor",
                                     ggml_backend_dev_name(plan.device)));
    }
    plan.host_mode = in_stream ? SPAC_HOST_IN_STREAM : wanted == SPAC_HOST_AUTO ? SPAC_HOST_EXECUTOR
                                                                                : wanted;
    if (plan.host_mode == SPAC_HOST_IN_GRAPH && !is_cpu) {
        throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                         spac_format("in-graph host experts need the CPU as the device, not %s", ggml_backend_dev_name(plan.device)));
    }
}

static void divide_cache(spac_plan & plan, const std::string & cache_size, const spac_layers & layers) {
    const size_t n_group = layers.group_like.size();
    if (!plan.has_slots) {
        plan.group_slots.assign(n_group, 0);
        return;
    }
    std::vector<uint64_t> bytes(n_group), n_experts(n_group);
    for (const spac_moe_layer * layer : layers.split()) {
        bytes[layer->group] = layer->expert_bytes();
        n_experts[layer->group] += layer->n_expert;
    }
    for (size_t g = 0; g < n_group; g++) {
        n_experts[g] = std::min(n_experts[g], spac_max_slots(*layers.group_like[g], plan.device));
    }
    const uint64_t guards = std::accumulate(bytes.begin(), bytes.end(), uint64_t(0)); // one per group
    const uint64_t budget = spac_parse_cache(cache_size, layers.total_bytes, guards, plan.device);
    plan.group_slots      = spac_divide_slots(budget, bytes, n_experts);

    for (size_t g = 0; g < n_group; g++) {
        if (plan.group_slots[g] == 0) {
            throw spac_error(SPAC_STATUS_INVALID_ARGUMENT,
                             spac_format("cache \"%s\" has no room for one expert of %.2f MiB: use at least %.0f MiB", cache_size.c_str(),
                                         bytes[g] / 1048576.0, bytes[g] / 1048576.0 * n_group + 1));
        }
    }
}

// memory that is mapped, or that the driver refused to pin
static void find_unpinned(spac_plan & plan, const spac_layers & layers) {
    for (const spac_moe_layer * layer : layers.split()) {
        plan.n_layer_unpinned += !spac_is_pinned(layer->parts[SPAC_PART_DOWN]->buffer, plan.device);
    }
    if (plan.n_layer_unpinned > 0) {
        spac_log("experts of %d layers are not in memory that %s has pinned: copies are slower (load with --load-mode none; the "
                 "driver may also have refused it)",
                 plan.n_layer_unpinned, ggml_backend_dev_name(plan.device));
    }
}

// a device that does not know of id -1 computes wrongly, or reads where nothing is; the CPU backend is our own
static void probe_device(const spac_plan & plan, const spac_layers & layers, int max_batch) {
    if (!plan.has_slots || plan.device_is_cpu()) {
        return;
    }
    for (const spac_moe_layer * layer : layers.group_like) {
        spac_probe_device(plan.device, *layer, max_batch);
    }
}

spac_plan spac_make_plan(const spac_settings & settings, spac_layers & layers) {
    const bool is_on_disk = !settings.ram.empty();
    spac_plan  plan;
    choose_device(plan, settings, layers);
    layers.check(plan.has_slots);
    choose_kernels(plan, settings.params, is_on_disk);
    give_kernels_to_layers(plan, layers, is_on_disk);
    layers.form_groups();
    choose_host_mode(plan, settings.params.host_mode, layers);
    divide_cache(plan, settings.cache, layers);
    if (is_on_disk) {
        say_what_stays_mapped(layers);
    } else {
        find_unpinned(plan, layers);
    }
    probe_device(plan, layers, settings.params.max_batch);
    return plan;
}
