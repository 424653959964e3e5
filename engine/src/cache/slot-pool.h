// The device memory of the resident experts: one tensor per part and layout group, n_slots experts each.
#pragma once

#include "layers/moe-layer.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <memory>
#include <vector>

struct spac_slot_group {
    const spac_moe_layer * like    = nullptr; // any layer of the group
    int32_t                n_slots = 0;       // without the guard slot

    ggml_tensor * parts[SPAC_N_PARTS] = {}; // [.., .., n_slots + 1]; biases [.., n_slots + 1]
    size_t        bytes               = 0;  // device memory

    ggml_context *        ctx    = nullptr;
    ggml_backend_buffer_t buffer = nullptr;

    spac_slot_group()                        = default;
    spac_slot_group(const spac_slot_group &) = delete;
    ~spac_slot_group();

    // throws SPAC_STATUS_OUT_OF_MEMORY
    void allocate(ggml_backend_buffer_type_t buft);

    // whether slots from any multiple of n on can be a tensor of their own, as far as the device's alignment goes
    bool can_begin_at(int64_t n) const;
};

typedef std::vector<std::unique_ptr<spac_slot_group>> spac_slot_groups;

// like: any layer of each group, whose device is one of these; throws SPAC_STATUS_OUT_OF_MEMORY
spac_slot_groups spac_make_slots(const std::vector<const spac_moe_layer *> & like, const std::vector<int32_t> & n_slots,
                                 const std::vector<ggml_backend_dev_t> & devices);

// the most that a group of layers like this one may have: beyond, CUDA's 32-bit counts of blocks and grids overflow, or the
// device says that the tensors are too large for it (maxStorageBufferRange of Vulkan) and ggml would compute elsewhere
uint64_t spac_max_slots(const spac_moe_layer & like, ggml_backend_dev_t device);

// how many slots each group gets out of budget_bytes: in proportion to its experts' bytes, at most all of them, and 65534
// expert_bytes, n_experts: of each group; guard slots come on top
std::vector<int32_t> spac_divide_slots(uint64_t budget_bytes, const std::vector<uint64_t> & expert_bytes, const std::vector<uint64_t> & n_experts);
