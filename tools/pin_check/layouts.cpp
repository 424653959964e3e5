// Structs of ggml's that pyspac reads by offset: pyspac/lab/recorder.py has the same numbers.
#include "ggml.h"

#include <cstddef>

static_assert(offsetof(ggml_tensor, type) == 0, "ggml_tensor.type");
static_assert(offsetof(ggml_tensor, ne) == 16, "ggml_tensor.ne");
static_assert(offsetof(ggml_tensor, nb) == 48, "ggml_tensor.nb");
static_assert(offsetof(ggml_tensor, src) == 152, "ggml_tensor.src");
static_assert(offsetof(ggml_tensor, name) == 256, "ggml_tensor.name");
static_assert(sizeof(ggml_tensor::ne) == 32 && sizeof(ggml_tensor::nb) == 32, "ggml_tensor has four dimensions");
static_assert(sizeof(ggml_tensor::src) == 80, "ggml_tensor has ten sources");
static_assert(sizeof(ggml_tensor::name) == 64, "ggml_tensor's name has 64 bytes");
static_assert(GGML_TYPE_F32 == 0 && GGML_TYPE_F16 == 1, "enum ggml_type");
