// What a device takes from the memory tier, which may hold an expert, or has to read it only for the device.
#include "memory-tier.h"

bool spac_memory_tier::copy_to_device(int il, int32_t ie, const std::function<void(const spac_expert_parts &)> & copy) {
    std::unique_lock<std::mutex> lock(mutex);
    layer_info &                 info    = info_of(il);
    const bool                   is_held = info.experts[ie].slot >= 0;
    const int32_t                is      = is_held ? info.experts[ie].slot : n_slots;
    slot &                       s       = slots[is];
    if (!is_held) {
        read(info, ie, is, false);
    }
    s.is_copied = true; // the slot is not taken
    rate(is);
    changed.wait(lock, [&] { return s.now.load(std::memory_order_relaxed) != READING; });

    const bool is_there = s.now.load(std::memory_order_relaxed) == THERE;
    if (is_there) {
        spac_expert_parts parts = info.layer->parts_of(ie);
        for (int part = 0; part < SPAC_N_PARTS; part++) {
            parts[part] = s.parts[part] ? s.parts[part] : parts[part]; // biases are in memory
        }
        lock.unlock();
        copy(parts);
        lock.lock();
        set_on_device(info.experts[ie], true);
        total.n_to_device++;
        total.n_to_device_read += !is_held;
    }
    s.is_copied = false;
    rate(is);
    changed.notify_all(); // who waits for a slot
    return is_there;
}

void spac_memory_tier::left_device(int il, int32_t ie) {
    std::lock_guard<std::mutex> lock(mutex);
    set_on_device(info_of(il).experts[ie], false);
}

void spac_memory_tier::set_on_device(expert & e, bool is_on_device) {
    e.is_on_device = is_on_device;
    if (e.slot >= 0) {
        rate(e.slot);
    }
}

void spac_memory_tier::use_on_device(int il, const int32_t * experts, const uint32_t * n_rows, const int32_t * device_slots, size_t n) {
    std::lock_guard<std::mutex> lock(mutex);
    layer_info &                info = info_of(il);
    for (size_t i = 0; i < n; i++) {
        if (device_slots[i] >= 0) {
            take(info.experts[experts[i]], n_rows[i]);
        }
    }
}
