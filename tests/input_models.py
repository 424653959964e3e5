"""GGUF files for tests of the command line: a target, drafts, a dense model, broken files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf_models
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

DRAFT_SEED = 99


def write_target(path: Path, name: str = "qwen3moe", **metadata: object) -> Path:
    """A tiny MoE model with random weights; `metadata` replaces values of its own."""
    model = _build(name)
    model.metadata |= metadata
    gguf_models._write(path, model)
    return path


def write_draft(path: Path, name: str = "qwen3moe", share_wrong: float = 0.3) -> Path:
    """The same model with a share of its output rows exchanged: a draft model that is right at times."""
    model = _build(name)
    data, qtype = model.tensors["output.weight"]  # [n_vocab, row bytes]
    rng = np.random.default_rng(DRAFT_SEED)
    rows = rng.random(len(data)) < share_wrong
    data[rows] = data[rng.permutation(len(data))][rows]
    model.tensors["output.weight"] = (data, qtype)
    gguf_models._write(path, model)
    return path


def write_dense(path: Path) -> Path:
    """A dense model of the same vocabulary."""
    model = _empty("llama")
    gguf_models._embeddings(model)
    for il in range(model.shape.n_layer):
        gguf_models._attention(model, il)
        model.norm(f"blk.{il}.ffn_norm")
        gguf_models._dense(model, il, model.shape.n_ff)
    gguf_models._write(path, model)
    return path


def write_other_vocab(path: Path) -> Path:
    """A dense model whose token 100 is another one."""
    write_dense(path)
    path.write_bytes(path.read_bytes().replace(b"<0x61>", b"<0x@@>"))
    return path


def write_f64(path: Path) -> Path:
    """A model in which one tensor is F64."""
    model = _empty("llama")
    gguf_models._embeddings(model)
    model.tensors["output_norm.weight"] = (np.ones(model.shape.n_embd, np.float64), Type.F64)
    gguf_models._write(path, model)
    return path


def write_vocab_only(path: Path) -> Path:
    """Metadata and no tensors."""
    writer = GGUFWriter(path, "llama")
    gguf_models._write_vocabulary(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_cut(path: Path, whole: Path, n_bytes: int) -> Path:
    """The first `n_bytes` of `whole`; negative: all but the last."""
    path.write_bytes(whole.read_bytes()[:n_bytes])
    return path


def write_version(path: Path, whole: Path, version: int) -> Path:
    """`whole` with another GGUF version."""
    data = bytearray(whole.read_bytes())
    data[4:8] = struct.pack("<I", version)
    path.write_bytes(data)
    return path


def _build(name: str) -> gguf_models.Model:
    architecture = gguf_models.ARCHITECTURES[name]
    model = _empty(architecture.arch, architecture.shape)
    architecture.build(model)
    return model


def _empty(arch: str, shape: gguf_models.Shape | None = None) -> gguf_models.Model:
    shape = shape or gguf_models.Shape()
    model = gguf_models.Model(arch, shape, gguf_models.MIXED_TYPES, np.random.default_rng(0))
    model.metadata |= gguf_models._common_metadata(shape)
    if arch == "llama":
        del model.metadata["expert_count"], model.metadata["expert_used_count"]
    return model


def write_split(folder: Path, name: str) -> tuple[Path, Path]:
    """The model in two files, as llama-gguf-split makes them."""
    model = _build(name)
    names = list(model.tensors)
    paths = tuple(folder / f"split-{i + 1:05d}-of-00002.gguf" for i in range(2))
    for i, path in enumerate(paths):
        writer = GGUFWriter(path, model.arch)
        if i == 0:
            for key, value in model.metadata.items():
                gguf_models._write_value(writer, f"{model.arch}.{key}", value)
            gguf_models._write_vocabulary(writer)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in names[i::2]:
            data, qtype = model.tensors[tensor]
            writer.add_tensor(tensor, data, raw_dtype=qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0], paths[1]


def write_incomplete(path: Path) -> Path:
    """A MoE model without its last layer's tensors."""
    model = _build("qwen3moe")
    gone = f"blk.{model.shape.n_layer - 1}."
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(gone)}
    gguf_models._write(path, model)
    return path
