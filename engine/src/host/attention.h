// Attention of wide batches by the engine's kernels, in place of ggml's (GGML_OP_FLASH_ATTN_EXT).
#pragma once

#include "kernels.h"

#include <cstddef>

struct ggml_compute_params;

// Tokens from which on a batch is wide: fewer are left to ggml, and the texts of short drafts with them.
static constexpr int SPAC_ATTENTION_TOKENS_MIN = 32;

// Keys and values of f16, a mask that all heads share, and scores that are neither capped (Gemma 2) nor sloped (ALiBi).
bool spac_can_attend(const spac_kernels & kernels, const ggml_tensor * op);

size_t spac_attention_work_size(const spac_kernels & kernels, const ggml_tensor * op, int n_threads);

// by every thread
void spac_attend(const spac_kernels & kernels, const ggml_compute_params & params, const ggml_tensor * op);
