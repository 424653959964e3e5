#include "host-work.h"

#include <algorithm>
#include <thread>
#include <vector>

// the context's, at most one per core of the range, but one core is left for copies where there are enough
static int count_threads(const spac_plan & plan, const spac_settings & settings, int n_threads_of_context) {
    const int n = settings.cpus.empty() ? n_threads_of_context : std::min(n_threads_of_context, (int) settings.cpus.size());
    return settings.params.n_threads > 0 ? settings.params.n_threads : plan.device_is_cpu() || n <= 4 ? n
                                                                                                      : n - 1;
}

static std::unique_ptr<spac_host_experts> make_in_graph(const spac_plan & plan, spac_memory_tier * tier) {
    const bool is_needed = plan.kernels && (plan.host_mode == SPAC_HOST_IN_GRAPH || tier); // prompts, too
    return is_needed ? std::make_unique<spac_host_experts>(*plan.kernels, tier) : nullptr;
}

static std::unique_ptr<spac_ggml_worker> make_ggml_worker(const spac_layers & layers, const spac_settings & settings, int n_threads) {
    std::vector<const spac_moe_layer *> with_ggml;
    for (const spac_moe_layer * layer : layers.split()) {
        if (!layer->own_kernels) {
            with_ggml.push_back(layer);
        }
    }
    return with_ggml.empty() ? nullptr : std::make_unique<spac_ggml_worker>(with_ggml, settings.params.max_batch, n_threads, settings.cpus);
}

static std::unique_ptr<spac_host_experts> make_on_device(const spac_plan & plan) {
    const bool is_needed = plan.kernels && plan.has_slots && plan.any_is_cpu();
    return is_needed ? std::make_unique<spac_host_experts>(*plan.kernels) : nullptr;
}

static std::unique_ptr<spac_kernel_worker> make_kernel_worker(const spac_plan & plan, const spac_settings & settings, int n_threads, spac_memory_tier * tier) {
    const size_t n_cores = settings.cpus.empty() ? std::thread::hardware_concurrency() : settings.cpus.size();
    // The graph's thread waits for the device, awake on a core of its own. In a stream one of the driver's collects, and the
    // graph's is awake all the same.
    const int  n_own          = settings.params.n_threads > 0 ? n_threads : std::max(1, n_threads - 1);
    const int  n_others       = plan.host_mode == SPAC_HOST_IN_STREAM ? 2 : 1;
    const bool has_spare_core = n_own + n_others < (int) n_cores;
    return std::make_unique<spac_kernel_worker>(*plan.kernels, n_own, has_spare_core, settings.cpus, tier);
}

spac_host_work::spac_host_work(const spac_plan & plan, const spac_layers & layers, const spac_settings & settings, int n_threads_of_context,
                               spac_memory_tier * tier) :
    in_graph(make_in_graph(plan, tier)),
    on_device(make_on_device(plan)) {
    if (!plan.has_executor()) {
        return;
    }
    const int n_threads = count_threads(plan, settings, n_threads_of_context);
    with_ggml           = make_ggml_worker(layers, settings, n_threads);
    if (plan.kernels) {
        with_kernels = make_kernel_worker(plan, settings, n_threads, tier);
    }
}

spac_host_worker & spac_host_work::worker_of(const spac_moe_layer & layer) {
    return layer.own_kernels ? (spac_host_worker &) *with_kernels : *with_ggml;
}

void spac_host_work::abandon() {
    if (with_kernels) {
        with_kernels->abandon();
    }
}

void spac_host_work::rest() {
    if (with_kernels) {
        with_kernels->rest();
    }
}

void spac_host_work::stop() {
    with_ggml.reset();
    with_kernels.reset();
}
