// Reads the engine's parameters: the cache size, the device, the range of cores.
#pragma once

#include "spac.h"

#include "ggml-backend.h"

#include <cstdint>
#include <string>
#include <vector>

// the parameters, with strings that live on
struct spac_settings {
    spac_engine_params params; // its strings may be gone: the ones below are theirs
    std::string        device, cache, board_name, lossy, baseline;
    std::vector<int>   cpus; // that the host's own threads are pinned to; empty: anywhere

    explicit spac_settings(const spac_engine_params & params); // throws as spac_parse_cpu_range does
};
// bytes of "25%" of all experts, "4096" (MiB), "4096M", "4G" or "4096B", 0 among them; UINT64_MAX: "auto"
// throws SPAC_STATUS_INVALID_ARGUMENT
// name: what it is the size of
uint64_t spac_size_bytes(const char * name, const std::string & text, uint64_t total_bytes);

// without a device there is nothing that a cache could be in; throws SPAC_STATUS_INVALID_ARGUMENT where one is asked for
void spac_check_no_cache(const std::string & text);

// the sizes of several devices' slot pools, "17%,4096", or one for each of them; throws SPAC_STATUS_INVALID_ARGUMENT unless
// there is one, or as many as devices
std::vector<std::string> spac_cache_sizes(const std::string & text, size_t n_devices);

// bytes of a device's slot pools for "17%", "4096" (MiB) or "auto", without guard slots
// total_bytes: of all experts of its layers; guard_bytes: of all guard slots
// throws SPAC_STATUS_INVALID_ARGUMENT, or SPAC_STATUS_OUT_OF_MEMORY if too little of the device's memory were left
uint64_t spac_parse_cache(const std::string & text, uint64_t total_bytes, uint64_t guard_bytes, ggml_backend_dev_t device);

// false: the text is not a number from lowest to highest, and nothing else
bool spac_read_number(const std::string & text, double lowest, double highest, double & number);

// throws SPAC_STATUS_INVALID_ARGUMENT for "emulated:" and something that is no speed
spac_device_kind spac_read_device(const std::string & name);

inline constexpr double SPAC_EMULATED_MIN = 0.01, SPAC_EMULATED_MAX = 100;

// of "emulated:0.3": 0.3 of the host's speed; 0: no speed is stated
double spac_emulated_speed(const std::string & name);

// those of all devices that llama.cpp takes where none is named (llama_prepare_model_devices), servers aside: dedicated GPUs,
// each once, though two backends may know it; integrated ones where there is no other
std::vector<ggml_backend_dev_t> spac_gpus_of_machine(const std::vector<ggml_backend_dev_t> & devices);

// those of these devices, which are a context's or all, that "CUDA0" or "CUDA0,CUDA1" names, in that order: for "auto" all
// but the CPU, and no more than there may be; for "emulated" the CPU; none for "none"
// throws SPAC_STATUS_DEVICE where one is not there or named twice
std::vector<ggml_backend_dev_t> spac_choose_devices(const std::string & names, const std::vector<ggml_backend_dev_t> & devices);

// the cores of "0-7"; throws SPAC_STATUS_INVALID_ARGUMENT if one of them is not open to this process
std::vector<int> spac_parse_cpu_range(const std::string & text);

bool spac_device_is_cpu(ggml_backend_dev_t device);

// whether copies from a host buffer to the device are fast: true if it is of the type that the device pins, or if the device
// has no such type
bool spac_is_pinned(ggml_backend_buffer_t buffer, ggml_backend_dev_t device);
