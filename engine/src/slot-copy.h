// Copies one expert from host memory into its slot, on a backend instance (and so a stream) of its own.
#pragma once

#include "moe-layer.h"
#include "slot-pool.h"

struct spac_slot_copy {
    explicit spac_slot_copy(ggml_backend_dev_t device); // throws SPAC_STATUS_DEVICE
    ~spac_slot_copy();

    // returns when the bytes are on the device; ggml's interface reports no failure: a backend whose copy fails aborts
    // from: parts of an expert of this layer; is_alone: nothing that the graph waits for queues behind it
    void copy(const spac_moe_layer & layer, const spac_expert_parts & from, const spac_slot_group & group, int slot, bool is_alone);

  private:
    ggml_backend_t backend = nullptr;
};
