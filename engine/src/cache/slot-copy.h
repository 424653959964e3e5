// Copies one expert from host memory into its slot, beside the graph: on a backend instance (and so a stream) of its own, or
// by the device's buffers.
#pragma once

#include "layers/moe-layer.h"
#include "slot-pool.h"

// Whether copies into the device's buffers are quicker done by the buffer than by a backend instance. ggml-vulkan's instances
// share the compute queue, where a copy waits for the graph and the graph for the copy; its buffers write to memory that the
// host sees, or have the transfer queue copy.
bool spac_copies_by_buffer(ggml_backend_dev_t device);

struct spac_slot_copy {
    explicit spac_slot_copy(ggml_backend_dev_t device); // throws SPAC_STATUS_DEVICE
    ~spac_slot_copy();

    // returns when the bytes are on the device; ggml's interface reports no failure: a backend whose copy fails aborts
    // from: parts of an expert of this layer; is_alone: nothing that the graph waits for queues behind it
    void copy(const spac_moe_layer & layer, const spac_expert_parts & from, const spac_slot_group & group, int slot, bool is_alone);

  private:
    void put(ggml_tensor * slots, const char * data, size_t offset, size_t bytes);
    void wait();

    ggml_backend_t backend = nullptr; // NULL: the slots' buffer copies
};
