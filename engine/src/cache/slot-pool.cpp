#include "slot-pool.h"

#include "base/status.h"

#include "ggml-alloc.h"

#include <algorithm>
#include <cstring>

// of a group: with the guard slot, as many as CUDA's grids have room for in their third dimension (MMQ)
static constexpr uint64_t MAX_SLOTS = 65534;

// of a quantised tensor (MMVQ, MMQ); elements that are no blocks are counted in 64 bits (patches/upstream/0002)
static constexpr uint64_t MAX_BLOCKS = INT32_MAX;

spac_slot_group::~spac_slot_group() {
    ggml_backend_buffer_free(buffer);
    if (ctx) {
        ggml_free(ctx);
    }
}

void spac_slot_group::allocate(ggml_backend_buffer_type_t buft) {
    ctx = ggml_init({ SPAC_N_PARTS * ggml_tensor_overhead(), nullptr, true });

    // MMQ kernels read past the last expert: one guard slot
    const int64_t n = n_slots + 1;
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        const ggml_tensor * t = like->parts[part];
        if (!t) {
            continue;
        }
        const bool is_bias = part >= SPAC_PART_UP_B;
        parts[part]        = is_bias ? ggml_new_tensor_2d(ctx, t->type, t->ne[0], n) : ggml_new_tensor_3d(ctx, t->type, t->ne[0], t->ne[1], n);
        ggml_format_name(parts[part], "spac_pool_%d_%s", part, ggml_type_name(t->type));
    }

    buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
    if (!buffer) {
        throw spac_error(SPAC_STATUS_OUT_OF_MEMORY,
                         spac_format("%lld expert slots of %.1f MiB do not fit into %s: use a smaller --cache", (long long) n,
                                     like->expert_bytes() / 1048576.0, ggml_backend_buft_name(buft)));
    }
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    bytes = ggml_backend_buffer_get_size(buffer);
    // of host memory all is taken now: else the first copies would take it (patches/upstream/0026), whose time is measured
    if (ggml_backend_buffer_is_host(buffer)) {
        memset(ggml_backend_buffer_get_base(buffer), 0, bytes);
    } else {
        ggml_backend_buffer_clear(buffer, 0);
    }
}

bool spac_slot_group::can_begin_at(int64_t n) const {
    const size_t alignment = ggml_backend_buffer_get_alignment(buffer);
    return std::all_of(parts, parts + SPAC_N_PARTS, [&](const ggml_tensor * t) { return !t || n * t->nb[ggml_n_dims(t) - 1] % alignment == 0; });
}

spac_slot_groups spac_make_slots(const std::vector<const spac_moe_layer *> & like, const std::vector<int32_t> & n_slots,
                                 const std::vector<ggml_backend_dev_t> & devices) {
    spac_slot_groups groups;
    for (size_t g = 0; g < n_slots.size(); g++) {
        groups.push_back(std::make_unique<spac_slot_group>());
        groups[g]->like    = like[g];
        groups[g]->n_slots = n_slots[g];
        groups[g]->allocate(ggml_backend_dev_buffer_type(devices[like[g]->device]));
    }
    return groups;
}

static bool can_compute(ggml_backend_dev_t device, const ggml_tensor * like, int64_t n_slots) {
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true }), ggml_free);
    ggml_tensor *                                             slots = ggml_new_tensor_3d(ctx.get(), like->type, like->ne[0], like->ne[1], n_slots);
    ggml_tensor *                                             x     = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, like->ne[0], 1, 1);
    ggml_tensor *                                             ids   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
    return ggml_backend_dev_supports_op(device, ggml_mul_mat_id(ctx.get(), slots, x, ids));
}

// at most n_slots and a guard; all of them where the device cannot even compute with one: the probe says that better
static uint64_t max_slots_of_device(ggml_backend_dev_t device, const ggml_tensor * like, uint64_t n_slots) {
    uint64_t low = 1, high = n_slots; // low fits, or none does
    if (can_compute(device, like, high + 1) || !can_compute(device, like, low + 1)) {
        return n_slots;
    }
    while (high - low > 1) {
        const uint64_t middle                                = (low + high) / 2;
        (can_compute(device, like, middle + 1) ? low : high) = middle;
    }
    return low;
}

uint64_t spac_max_slots(const spac_moe_layer & like, ggml_backend_dev_t device) {
    uint64_t n_slots = MAX_SLOTS;
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        const ggml_tensor * t = like.parts[part];
        if (t && ggml_is_quantized(t->type)) {
            const uint64_t blocks_per_expert = like.part_bytes(part) / ggml_type_size(t->type);
            n_slots                          = std::min(n_slots, MAX_BLOCKS / blocks_per_expert - 1); // and the guard slot
        }
    }
    for (int part = 0; part < SPAC_PART_UP_B; part++) {
        if (like.parts[part]) {
            n_slots = max_slots_of_device(device, like.parts[part], n_slots);
        }
    }
    return n_slots;
}

std::vector<int32_t> spac_divide_slots(uint64_t budget_bytes, const std::vector<uint64_t> & expert_bytes, const std::vector<uint64_t> & n_experts) {
    double total = 0;
    for (size_t i = 0; i < expert_bytes.size(); i++) {
        total += (double) expert_bytes[i] * n_experts[i];
    }
    const double share = total > 0 ? std::min(1.0, budget_bytes / total) : 0.0;

    std::vector<int32_t> n_slots(expert_bytes.size());
    uint64_t             used = 0;
    for (size_t i = 0; i < n_slots.size(); i++) {
        n_slots[i] = (int32_t) std::min(share * n_experts[i] + 1e-9, (double) MAX_SLOTS);
        used += n_slots[i] * expert_bytes[i];
    }

    // what rounding left over goes to the groups in order
    for (size_t i = 0; i < n_slots.size(); i++) {
        while ((uint64_t) n_slots[i] < std::min(n_experts[i], MAX_SLOTS) && used + expert_bytes[i] <= budget_bytes) {
            n_slots[i]++;
            used += expert_bytes[i];
        }
    }
    return n_slots;
}
