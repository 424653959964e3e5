"""Dense draft models as wide as a MoE target, as Mistral-7B is of Mixtral: made of the demo target.

Attention, norms and embeddings are the target's own; a layer's FFN is the mean of its experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize

TARGET = Path(__file__).resolve().parent.parent / "pyspac" / "models" / "demo-moe.gguf"
_EXPERTS = {"ffn_gate_exps": "ffn_gate", "ffn_up_exps": "ffn_up", "ffn_down_exps": "ffn_down"}


def write_dense_draft(path: Path, n_layer: int = 6) -> Path:
    """Write the demo target's first `n_layer` layers; a layer more than it has is its last one again."""
    reader = GGUFReader(TARGET)
    writer = GGUFWriter(path, "qwen3")
    _write_metadata(reader, writer, n_layer)
    tensors = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    n_target = sum(name.endswith("attn_q.weight") for name in tensors)
    for name in ("token_embd.weight", "output_norm.weight"):
        _add(writer, name, tensors[name])
    for il in range(n_layer):
        prefix = f"blk.{min(il, n_target - 1)}."
        for name, values in tensors.items():
            part = name.removeprefix(prefix).removesuffix(".weight")
            if name.startswith(prefix) and part != "ffn_gate_inp":
                _add(writer, f"blk.{il}.{_EXPERTS.get(part, part)}.weight", _dense(part, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _dense(part: str, values: Any) -> Any:
    """[n_expert, n_out, n_in] experts side by side in one FFN, which adds up their mean."""
    if part not in _EXPERTS:
        return values
    if part == "ffn_down_exps":
        return np.concatenate(list(values / len(values)), axis=1)
    return np.concatenate(list(values), axis=0)


def _add(writer: GGUFWriter, name: str, values: Any) -> None:
    writer.add_tensor(name, values.astype(np.float32 if values.ndim == 1 else np.float16))


def _write_metadata(reader: GGUFReader, writer: GGUFWriter, n_layer: int) -> None:
    n_ff = 0
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_up_exps.weight":
            n_ff = int(tensor.shape[1] * tensor.shape[2])
    sizes = {"block_count": n_layer, "feed_forward_length": n_ff}
    for key, value in reader.fields.items():
        prefix, _, name = key.partition(".")
        if prefix == "qwen3moe" and "expert" not in name:
            kind = value.types[0]
            writer.add_key_value(f"qwen3.{name}", sizes.get(name, value.contents()), kind)
        elif prefix == "tokenizer":
            sub_type = value.types[1] if len(value.types) > 1 else None
            writer.add_key_value(key, value.contents(), value.types[0], sub_type)
