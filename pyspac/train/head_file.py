"""From a model's GGUF: what its head shares with it. To a GGUF: the head, for `-md` with draft-eagle3."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor

from pyspac.errors import ModelError
from pyspac.model.gguf_header import GgufHeader
from pyspac.train.head import N_LAYERS, Head, HeadShape, Shared

ARCHITECTURE: Final = "eagle3"
FF_RATIO: Final = 2  # of the feed-forward's width to the head's
GROUP: Final = 4  # heads that share keys and values


def choose_layers(n_layer: int) -> tuple[int, ...]:
    """Whose inputs a head reads: near the beginning, in the middle, and near the end; as the paper's."""
    last = n_layer - (3 if n_layer >= 12 else 1)
    return min(2, n_layer // 6), n_layer // 2, last


def choose_shape(model: GgufHeader) -> HeadShape:
    n_embd = int(model.get("embedding_length"))
    n_head_dim = 128 if n_embd >= 1024 else 64
    n_head_kv = max(1, n_embd // n_head_dim // GROUP)
    return HeadShape(
        n_embd=n_embd,
        n_head=max(1, n_embd // n_head_dim // n_head_kv) * n_head_kv,
        n_head_kv=n_head_kv,
        n_head_dim=n_head_dim,
        n_ff=FF_RATIO * n_embd,
        rms_eps=float(model.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope_base=float(model.get("rope.freq_base", 1e4)),
    )


def read_shared(model: GgufHeader, device: torch.device) -> Shared:
    """Raises ModelError for a type that cannot be read here, and where the embeddings are missing."""
    embeddings = _read_tensor(model, "token_embd.weight")
    outputs, norm = (_read_tensor(model, f"{name}.weight") for name in ("output", "output_norm"))
    if embeddings is None:
        raise ModelError(f"{model.path}: token_embd.weight is missing; give the model's own GGUF file")
    n_embd = embeddings.shape[1]

    def here(array: npt.NDArray[np.float32]) -> Tensor:
        return torch.tensor(array, device=device)

    embedded = here(embeddings)
    return Shared(
        embeddings=embedded,
        outputs=embedded if outputs is None else here(outputs),  # None: tied
        norm=here(np.ones(n_embd, np.float32) if norm is None else norm.reshape(-1)),
    )


def _read_tensor(model: GgufHeader, name: str) -> npt.NDArray[np.float32] | None:
    """As [n_rows, n_columns] float32; None: there is none of that name."""
    found = next((tensor for tensor in model.tensors if tensor.name == name), None)
    if found is None:
        return None
    rows = np.fromfile(found.path, np.uint8, found.n_bytes, offset=found.offset)
    n_rows = int(np.prod(found.shape[1:]))
    try:
        numbers = dequantize(rows.reshape(n_rows, -1), GGMLQuantizationType[found.type_name])
    except (KeyError, NotImplementedError) as error:
        raise ModelError(
            f"{model.path}: {name} has the type {found.type_name}, which cannot be read for training; give a "
            "file whose embeddings and outputs have another type, such as Q8_0"
        ) from error
    return np.asarray(numbers, np.float32)


def write_head(path: Path, head: Head, model: GgufHeader, layers: tuple[int, ...]) -> None:
    """Write the head's GGUF, whole or not at all: matrices as F16, what reads the hidden states as F32."""
    part = path.with_name(f".{path.name}.part")
    writer = GGUFWriter(part, ARCHITECTURE)
    try:
        _write_metadata(writer, head.shape, model, layers)
        _write_vocabulary(writer, model.path)
        for name, weight in tensors(head).items():
            writer.add_tensor(name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def tensors(head: Head) -> dict[str, npt.NDArray[np.floating]]:
    """By their names in the file. The division by `scale` is part of fc."""
    n_embd = head.shape.n_embd
    with torch.no_grad():
        weights = {name: p.detach().cpu() for name, p in head.named_parameters()}
        weights["fc.weight"] = head.fc.weight.cpu() / head.scale.cpu().repeat_interleave(n_embd)
    return {
        _file_name(name): weight.numpy().astype(
            np.float16
            if weight.dim() > 1 and not name.startswith("fc")
            else np.float32  # norms have to be F32
        )
        for name, weight in weights.items()
    }


def _file_name(name: str) -> str:
    whole = name if name.endswith(".weight") else f"{name}.weight"
    return whole if whole.startswith(("fc.", "output_norm.")) else f"blk.0.{whole}"


def _write_metadata(writer: GGUFWriter, shape: HeadShape, model: GgufHeader, layers: tuple[int, ...]) -> None:
    assert len(layers) == N_LAYERS
    writer.add_context_length(int(model.get("context_length", 4096)))
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.n_head_dim)
    writer.add_value_length(shape.n_head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", shape.n_embd)
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(layers))


def _write_vocabulary(writer: GGUFWriter, model: Path) -> None:
    """The model's own, without its chat template."""
    for name, field in GGUFReader(model).fields.items():
        if not name.startswith("tokenizer.") or name.startswith("tokenizer.chat_template"):
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
