"""The types of tensors that ggml has: their numbers, names and blocks."""

from __future__ import annotations

from typing import Final

from pyspac.engine.gguf_constants import GGML_QUANT_SIZES, GGMLQuantizationType

# [id] -> (name, elements per block, bytes per block); Q2_0 is newer than the gguf package's table
TENSOR_TYPES: Final[dict[int, tuple[str, int, int]]] = {
    int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType if t in GGML_QUANT_SIZES
} | {42: ("Q2_0", 64, 18)}
TYPE_IDS: Final = {name: type_id for type_id, (name, _, _) in TENSOR_TYPES.items()}
