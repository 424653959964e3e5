"""A tiny random EAGLE-3 draft for a random target: what llama.cpp's loader of `eagle3` asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf_models
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

TARGET_LAYERS = [0, 1, 2]  # whose inputs it reads; the target has three


def write_eagle3(
    path: Path, name: str, *, target_layers: list[int] | None = None, n_embd_target: int | None = None
) -> Path:
    """A draft of the model `name` of gguf_models.ARCHITECTURES; it has embeddings and outputs of its own.

    `target_layers`, `n_embd_target`: TARGET_LAYERS and the target's unless given.
    """
    n_embd_target = n_embd_target or gguf_models.ARCHITECTURES[name].shape.n_embd
    draft = gguf_models.Shape(n_layer=1)
    model = gguf_models.Model("eagle3", draft, gguf_models.MIXED_TYPES, np.random.default_rng(7))
    left_out = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    model.metadata |= {k: v for k, v in gguf_models._common_metadata(draft).items() if k not in left_out}
    model.metadata["target_layers"] = target_layers or TARGET_LAYERS
    model.metadata["target_hidden_size"] = n_embd_target
    gguf_models._embeddings(model)
    _layer(model, n_embd_target)
    gguf_models._write(path, model)
    return path


def _layer(model: gguf_models.Model, n_embd_target: int) -> None:
    s = model.shape
    model.matrix("fc", 3 * n_embd_target, s.n_embd)
    n_kv = s.n_head_kv * s.n_head_dim
    for projection, n_out in (("attn_q", s.n_embd), ("attn_k", n_kv), ("attn_v", n_kv)):
        model.matrix(f"blk.0.{projection}", 2 * s.n_embd, n_out)  # of the token and of the hidden state
    model.matrix("blk.0.attn_output", s.n_embd, s.n_embd)
    for norm in ("attn_norm", "attn_norm_2", "ffn_norm"):
        model.norm(f"blk.0.{norm}")
    gguf_models._dense(model, 0, s.n_ff)


def write_demo_head(path: Path, target: Path) -> Path:
    """A random draft of the demo's target, with that model's vocabulary, embeddings and outputs."""
    fields = GGUFReader(target).fields
    arch = fields["general.architecture"].contents()
    shape = replace(gguf_models.Shape(n_layer=1), n_embd=fields[f"{arch}.embedding_length"].contents())
    model = gguf_models.Model("eagle3", shape, gguf_models.MIXED_TYPES, np.random.default_rng(7))
    _layer(model, shape.n_embd)
    model.norm("output_norm")
    writer = GGUFWriter(path, model.arch)
    left_out = ("expert_count", "expert_used_count", "expert_feed_forward_length", "vocab_size")
    metadata = {k: v for k, v in gguf_models._common_metadata(shape).items() if k not in left_out}
    for key, value in (metadata | {"target_layers": [1, 3, 5], "target_hidden_size": shape.n_embd}).items():
        gguf_models._write_value(writer, f"{model.arch}.{key}", value)
    for name, field in fields.items():
        if name.startswith("tokenizer.ggml"):
            if field.types[0] == GGUFValueType.ARRAY:
                writer.add_array(name, field.contents())
            else:
                writer.add_key_value(name, field.contents(), field.types[0])
    for name, (data, qtype) in model.tensors.items():
        writer.add_tensor(name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
