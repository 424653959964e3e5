#include "slot-copy.h"

#include "status.h"

#include <algorithm>

// A device with one copy engine per direction takes copies in the order of their submission, over all streams: what the
// graph waits for, ids and rows of a layer, queues behind at most so much (20 us at 25 GB/s). Waiting costs time itself
// (docs/look-ahead.md): small parts of an expert share one wait.
static constexpr size_t BYTES_PER_WAIT = 512 << 10;

spac_slot_copy::spac_slot_copy(ggml_backend_dev_t device) :
    backend(ggml_backend_dev_init(device, nullptr)) {
    if (!backend) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("device %s could not be opened for copies: use another --device, or none", ggml_backend_dev_name(device)));
    }
}

spac_slot_copy::~spac_slot_copy() {
    ggml_backend_free(backend);
}

void spac_slot_copy::copy(const spac_moe_layer & layer, const spac_expert_parts & from, const spac_slot_group & group, int slot, bool is_alone) {
    const size_t per_wait = is_alone ? layer.expert_bytes() : BYTES_PER_WAIT;
    size_t       room     = per_wait;
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        const size_t bytes = layer.part_bytes(part);
        for (size_t done = 0, n; done < bytes; done += n) {
            n = std::min(room, bytes - done);
            ggml_backend_tensor_set_async(backend, group.parts[part], from[part] + done, slot * bytes + done, n);
            room -= n;
            if (room == 0) {
                ggml_backend_synchronize(backend);
                room = per_wait;
            }
        }
    }
    ggml_backend_synchronize(backend);
}
