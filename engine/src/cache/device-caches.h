// The expert caches of an engine, one per device: whoever asks about a layer reaches that of the device which holds its
// experts. A handle: it may be copied, and the caches outlive it.
#pragma once

#include "expert-cache.h"

#include <cstdint>
#include <vector>

struct spac_device_caches {
    spac_device_caches() = default; // without a device
    spac_device_caches(spac_expert_cache & only) :
        spac_device_caches(&only) {}
    spac_device_caches(spac_expert_cache * only) : // NULL: none
        caches(only ? 1 : 0, only) {}

    // of_layer: [n_layer] which of them
    spac_device_caches(std::vector<spac_expert_cache *> caches, std::vector<uint32_t> of_layer) :
        caches(std::move(caches)), of_layer(std::move(of_layer)) {}

    bool empty() const { return caches.empty(); }

    const std::vector<spac_expert_cache *> & all() const { return caches; }

    size_t              index_of(uint32_t il) const { return caches.size() == 1 ? 0 : of_layer[il]; }
    spac_expert_cache & of(uint32_t il) const { return *caches[index_of(il)]; }

    // as the functions of one cache

    // its mutex is locked once, and that of each other device's cache, where `keeps_pins` is false
    void run_layer(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots, bool keeps_pins, size_t n_fill) const;

    void pin(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, int32_t * slots) const { of(il).pin(il, experts, n_rows, n, slots); }

    void fill(uint32_t il, const int32_t * experts, const uint32_t * n_rows, size_t n, size_t n_tokens, size_t n_held_max) const {
        of(il).fill(il, experts, n_rows, n, n_tokens, n_held_max);
    }

    uint64_t forward_of(uint32_t il) const { return of(il).forward_of(il); }
    bool     has_run(uint32_t il, uint64_t forward) const { return of(il).has_run(il, forward); }
    size_t   expect(const spac_expectation & what, const std::vector<int32_t> & experts) const { return of(what.il).expect(what, experts); }
    double   copy_us(uint32_t il) const { return of(il).copy_us(il); }

    int32_t slot_of(uint32_t il, uint32_t ie) const { return of(il).slot_of(il, ie); }

    // of all of them

    // byte_budgets: of each device; what is missing has none
    void apply(const uint8_t * utility, const uint8_t * tau, const uint32_t * load, size_t n_load, const std::vector<uint64_t> & byte_budgets) const;
    void cancel() const;
    void unpin_all() const;
    void begin_forward() const;
    void idle() const;
    bool wait_idle(int32_t timeout_ms) const; // altogether
    void check() const;

  private:
    std::vector<spac_expert_cache *> caches;
    std::vector<uint32_t>            of_layer;
};
