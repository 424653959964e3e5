// Who computes the host's experts: in the graph, or on threads of the engine's own beside a device.
#pragma once

#include "host/ggml-worker.h"
#include "host/host-experts.h"
#include "host/kernel-worker.h"
#include "host/worker.h"
#include "layers/layers.h"
#include "plan.h"

#include <memory>

struct spac_host_work {
    // n_threads_of_context: the engine's own threads are about as many, unless the settings say
    // tier: of experts on disk, or NULL
    spac_host_work(const spac_plan & plan, const spac_layers & layers, const spac_settings & settings, int n_threads_of_context, spac_memory_tier * tier);

    spac_host_worker & worker_of(const spac_moe_layer & layer); // with the executor
    bool               has_ggml_worker() const { return with_ggml != nullptr; }

    void abandon(); // a forward begins: what the one before, if it was aborted, left undone is at an end
    void rest();    // no forward is in progress: threads need not stay awake
    void stop();    // for good: nothing reads the weights any more

    const std::unique_ptr<spac_host_experts> in_graph;  // with the engine's own kernels; else NULL
    const std::unique_ptr<spac_host_experts> on_device; // the same kernels for experts in slots, where the device is the CPU; else NULL

  private:
    std::unique_ptr<spac_ggml_worker>   with_ggml;    // of the layers without kernels of our own
    std::unique_ptr<spac_kernel_worker> with_kernels; // of those with
};
