// Who computes a layer's host experts while the device works, and gives their rows back.
// One layer at a time: submit() from the dispatch node, wait() from the collect node.
#pragma once

#include "layers/moe-layer.h"

#include <cstdint>

struct spac_host_worker {
    // cur: [n_embd, 1 or n_expert_used, n_tokens] f32, in host memory, copied before this returns
    // ids_host, ids: [n_expert_used * n_tokens]; -1 in ids_host: not here
    virtual void submit(const spac_moe_layer * layer, const ggml_tensor * cur, const int32_t * ids_host, const int32_t * ids, int n_tokens) = 0;

    // rows [n_embd, n_expert_used, n_tokens] of the layer submitted last; valid until the next submit
    // busy_us: how long they took to compute
    virtual const float * wait(uint64_t & busy_us) = 0;

    virtual ~spac_host_worker() = default;
};
