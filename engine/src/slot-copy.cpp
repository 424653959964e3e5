#include "slot-copy.h"

#include "status.h"

spac_slot_copy::spac_slot_copy(ggml_backend_dev_t device) :
    backend(ggml_backend_dev_init(device, nullptr)) {
    if (!backend) {
        throw spac_error(SPAC_STATUS_DEVICE, spac_format("device %s could not be opened for copies", ggml_backend_dev_name(device)));
    }
}

spac_slot_copy::~spac_slot_copy() {
    ggml_backend_free(backend);
}

bool spac_slot_copy::copy(const spac_moe_layer & layer, int ie, const spac_slot_group & group, int slot) {
    for (int part = 0; part < SPAC_N_PARTS; part++) {
        const size_t bytes = layer.part_bytes(part);
        if (bytes > 0) {
            ggml_backend_tensor_set_async(backend, group.parts[part], layer.part_data(part, ie), slot * bytes, bytes);
        }
    }
    ggml_backend_synchronize(backend);
    return true;
}
