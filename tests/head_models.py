"""Tiny random models with heads that predict further tokens (NextN, MTP): a block more for each head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf_models
import numpy as np

WITH_HEADS = ("glm4moe", "deepseek3", "step35")
N_LAYER = 3


def write_headed(path: Path, name: str, n_heads: int = 1) -> Path:
    """The model `name` of gguf_models.ARCHITECTURES with heads, whose blocks are as the model's own are."""
    architecture = gguf_models.ARCHITECTURES[name]
    shape = replace(architecture.shape, n_layer=N_LAYER + n_heads)
    model = gguf_models.Model(architecture.arch, shape, gguf_models.MIXED_TYPES, np.random.default_rng(5))
    model.metadata |= gguf_models._common_metadata(shape)
    architecture.build(model)
    model.metadata["nextn_predict_layers"] = n_heads
    if limits := model.metadata.get("swiglu_clamp_exp"):  # one per block
        model.metadata["swiglu_clamp_exp"] = [*limits, *[0.0] * n_heads]  # type: ignore[misc]
    for il in range(N_LAYER, shape.n_layer):
        model.matrix(f"blk.{il}.nextn.eh_proj", 2 * shape.n_embd, shape.n_embd)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            model.norm(f"blk.{il}.nextn.{norm}")
    gguf_models._write(path, model)
    return path
