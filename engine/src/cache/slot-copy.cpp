#include "slot-copy.h"

#include "base/status.h"

#include <algorithm>
#include <cstring>

// A device with one copy engine per direction takes copies in the order of their submission, over all streams: what the
// graph waits for, ids and rows of a layer, queues behind at most so much (20 us at 25 GB/s; a whole expert or layer would take
// 0.1 to 4 ms). Waiting costs time itself, so small parts of an expert share one wait. GB/s with the CPU as the device/on the
// emulated GPU (benchmarks/bench_copies.py, 8 experts of a layer, medians of 15 rounds; no GPU was measured):
//
//   wait after                demo, 3 x 36 KiB   Qwen3-30B-A3B, 3 x 900 KiB   gpt-oss-120b, 3 x 4400 KiB
//   each part and 512 KiB     4.8/0.65           15.5/5.1                     11.4/4.8
//   512 KiB of an expert      5.9/1.9            13.3/4.8                     11.6/5.0
//   each expert               5.8/2.0            17.9/9.6                     11.4/9.6
//   the layer                 6.9/5.1            15.2/11.9                    10.0/9.9
static constexpr size_t BYTES_PER_WAIT = 512 << 10;

bool spac_copies_by_buffer(ggml_backend_dev_t device) {
    return strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "Vulkan") == 0;
}

spac_slot_copy::spac_slot_copy(ggml_backend_dev_t device) {
    if (spac_copies_by_buffer(device)) {
        return;
    }
    backend = ggml_backend_dev_init(device, nullptr);
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
            put(group.parts[part], from[part] + done, slot * bytes + done, n);
            room -= n;
            if (room == 0) {
                wait();
                room = per_wait;
            }
        }
    }
    wait();
}

void spac_slot_copy::put(ggml_tensor * slots, const char * data, size_t offset, size_t bytes) {
    if (backend) {
        ggml_backend_tensor_set_async(backend, slots, data, offset, bytes);
    } else {
        ggml_backend_tensor_set(slots, data, offset, bytes);
    }
}

void spac_slot_copy::wait() {
    if (backend) {
        ggml_backend_synchronize(backend);
    }
}
