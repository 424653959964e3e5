"""Adapters with mask tokens (draft-lora) and random matrices, for a random model's file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from pyspac.model import mtp
from pyspac.model.gguf_header import read_header

RANK = 4
MASK_IDS = (5, 6, 7, 8)  # ordinary tokens of the random models
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")


def write_adapter(
    path: Path,
    model: Path,
    *,
    mask_ids: Iterable[int] = MASK_IDS,
    base: str | None = None,
    is_gated: bool = True,
    extra: tuple[str, ...] = (),
    std: float = 0.5,
) -> Path:
    """On the attention's projections and the embeddings; `extra`: on these tensors of the model, too."""
    header, rng = read_header(model), np.random.default_rng(7)
    writer = GGUFWriter(path, header.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    if is_gated:
        ids = list(mask_ids)
        writer.add_uint32(mtp.N_MASKS, len(ids))
        writer.add_array(mtp.MASK_IDS, ids)
        writer.add_string(mtp.BASE, base or mtp.base_id(model))

    def add(name: str, n_rows_a: int, n_columns_a: int, n_rows_b: int, n_columns_b: int) -> None:
        """`a` about 1 long for each row, so that what it does is as large as what the model does."""
        a = rng.standard_normal((n_rows_a, n_columns_a), np.float32) / np.float32(np.sqrt(n_columns_a))
        b = rng.standard_normal((n_rows_b, n_columns_b), np.float32) * np.float32(std)
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b)

    for tensor in header.tensors:
        n_in, n_out = (*tensor.shape, 0)[:2]
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if tensor.name == "token_embd.weight":
            add(tensor.name, n_out, RANK, n_in, RANK)  # the other way round: rows are looked up
        elif tensor.name in extra or (tensor.name.endswith(".weight") and part in PROJECTIONS):
            add(tensor.name, RANK, n_in, n_out, RANK)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
