"""A tiny random EAGLE-3 draft for a random target: what llama.cpp's loader of `eagle3` asks for."""

from __future__ import annotations

from pathlib import Path

import gguf_models
import numpy as np

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
    model.matrix("fc", 3 * n_embd_target, draft.n_embd)
    n_kv = draft.n_head_kv * draft.n_head_dim
    for projection, n_out in (("attn_q", draft.n_embd), ("attn_k", n_kv), ("attn_v", n_kv)):
        model.matrix(f"blk.0.{projection}", 2 * draft.n_embd, n_out)  # of the token and of the hidden state
    model.matrix("blk.0.attn_output", draft.n_embd, draft.n_embd)
    for norm in ("attn_norm", "attn_norm_2", "ffn_norm"):
        model.norm(f"blk.0.{norm}")
    gguf_models._dense(model, 0, draft.n_ff)
    gguf_models._write(path, model)
    return path
