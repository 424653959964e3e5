"""Random LoRA adapters for any model: one that leaves the experts alone, and one that touches them.

The engine splits a layer under the first as ever, and leaves a layer under the second to llama.cpp.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGUFReader, GGUFWriter

RANK: Final = 4
# of the adapter's product, as a share of the weights' own size: enough to change texts, and not to spoil them
STRENGTH: Final = 0.3
DENSE: Final = re.compile(r"blk\.\d+\.attn_(q|output)\.weight")
EXPERTS: Final = re.compile(r"blk\.\d*[02468]\.ffn_(up|down)_exps\.weight")  # every other layer


def write_adapter(path: Path, model: Path, pattern: re.Pattern[str], seed: int) -> Path:
    """Write an adapter of `model`'s tensors whose names match. Raises ValueError if none does."""
    reader = GGUFReader(model)
    tensors = [tensor for tensor in reader.tensors if pattern.fullmatch(tensor.name)]
    if not tensors:
        raise ValueError(f"{model} has no tensor {pattern.pattern}: the soak has no adapter for it")
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for tensor in tensors:
        n_in, n_out, *n_expert = (int(n) for n in tensor.shape)
        # weights are about 1/sqrt(n_in) each; the product of A and B sums RANK terms
        std = np.sqrt(STRENGTH / np.sqrt(n_in * RANK))
        for suffix, shape in (("a", (RANK, n_in)), ("b", (n_out, RANK))):
            values = rng.standard_normal((*n_expert, *shape)) * std
            writer.add_tensor(f"{tensor.name}.lora_{suffix}", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_adapters(folder: Path, model: Path, seed: int = 0) -> list[Path]:
    """Both adapters of `model`: attention, and experts."""
    return [
        write_adapter(folder / "attention.gguf", model, DENSE, seed),
        write_adapter(folder / "experts.gguf", model, EXPERTS, seed + 1),
    ]
