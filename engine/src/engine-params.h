// Reads the engine's parameters: the cache size and the device.
#pragma once

#include "spac.h"

#include "ggml-backend.h"

#include <cstdint>
#include <string>
#include <vector>

// bytes of the slot pools for "17%", "4096" (MiB) or "auto"; total_bytes: of all experts that can be split
// throws SPAC_STATUS_INVALID_ARGUMENT, or SPAC_STATUS_OUT_OF_MEMORY if the device has not so much
uint64_t spac_parse_cache(const std::string & text, uint64_t total_bytes, ggml_backend_dev_t device);

// one of the context's devices: "auto" (its GPU, else the CPU), "cpu", or ggml's name
ggml_backend_dev_t spac_choose_device(const std::string & name, const std::vector<ggml_backend_dev_t> & devices);

bool spac_device_is_cpu(ggml_backend_dev_t device);
