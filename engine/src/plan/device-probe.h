// Whether a device can compute a part of a layer's experts: asked before anything relies on it.
#pragma once

#include "layers/moe-layer.h"

#include "ggml-backend.h"

// Runs the layer's experts on the device with few slots and most experts elsewhere (id -1), at two tokens and at max_batch:
// rows of absent experts have to be zero, the others what the CPU computes. Backends of an unpatched llama.cpp, an RPC
// server among them, read and write out of bounds for -1, or skip the row.
// Throws SPAC_STATUS_DEVICE that names the operation.
void spac_probe_device(ggml_backend_dev_t device, const spac_moe_layer & layer, int max_batch);

// Whether the device calls a custom op's function from its stream (patches/upstream/0006), asked with one like dispatch: its
// sources are router ids with gaps between the tokens' rows, and the layer's input. False for most backends, RPC among them.
bool spac_runs_host_functions(ggml_backend_dev_t device);
