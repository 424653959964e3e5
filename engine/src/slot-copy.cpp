#include "slot-copy.h"

#include "status.h"

#include <algorithm>

// A device with one copy engine per direction takes copies in the order of their submission, over all streams: what the
// graph waits for, ids and rows of a layer, queues behind at most one piece (20 us at 25 GB/s).
static constexpr size_t PIECE_BYTES = 512 << 10;

spac_slot_copy::spac_slot_copy(ggml_backend_dev_t device) :
    backend(ggml_backend_dev_init(device, nullptr)) {
    if (!backend) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("device %s could not be opened for copies: use another --device, or none", ggml_backend_dev_name(device)));
    }
}

spac_slot_copy::~spac_slot_copy() {
    ggml_backend_free(backend);
}

void spac_slot_copy::copy(const spac_moe_layer & layer, int ie, const spac_slot_group & group, int slot) {
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        const size_t bytes = layer.part_bytes(part);
        for (size_t done = 0; done < bytes; done += PIECE_BYTES) {
            const size_t n = std::min(PIECE_BYTES, bytes - done);
            ggml_backend_tensor_set_async(backend, group.parts[part], layer.part_data(part, ie) + done, slot * bytes + done, n);
            ggml_backend_synchronize(backend);
        }
    }
}
