"""What a device has to hold beside the experts' slots: the headers of target and draft in, bytes out.

Weights are counted exactly, the rest is an upper bound: all layers on the device, flash attention.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import GgufHeader

MARGIN_BYTES: Final = 768 << 20  # SPAC_AUTO_MARGIN_MIB
N_UBATCH: Final = 512  # tokens that llama.cpp computes at once, at most, unless it is told
_KV_BYTES: Final = 2  # F16
_F32_BYTES: Final = 4
_MASK_BYTES: Final = 2  # of the attention, F16, per token computed and token in the context
# Rows of a layer that are there at once. Of contexts of two models llama.cpp reserves 6.3 as wide as the
# layers' input and 2 as wide as what the feed-forward networks have between their matrices.
_N_INPUT_ROWS: Final = 8
_N_FFN_ROWS: Final = 3
_RECURRENT: Final = re.compile(r"\.(ssm_|time_mix|shortconv)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Device memory beside the experts' slots, in bytes."""

    weights: int  # of the target, without its routed experts
    draft: int  # weights of a draft model; a head's are among the target's
    kv: int  # of all contexts
    compute: int = 0  # buffers of all contexts
    margin: int = MARGIN_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.draft + self.kv + self.compute + self.margin


def estimate_needs(
    target: GgufHeader,
    draft: GgufHeader | None,
    n_ctx: int,
    n_ubatch: int = N_UBATCH,
    *,
    has_head: bool = False,
) -> Needs:
    """What target and draft take; `has_head`: the target's own head drafts, in a context of its own.

    `n_ctx`: tokens of either context, over all sequences. A head's keys and values are among the target's.
    `n_ubatch`: tokens that are computed at once.
    """
    geometry = read_geometry(target)
    drafting = draft or (target if has_head else None)
    return Needs(
        weights=geometry.model_bytes - geometry.experts_bytes,
        draft=sum(tensor.n_bytes for tensor in draft.tensors) if draft else 0,
        kv=kv_bytes(target, n_ctx) + (kv_bytes(draft, n_ctx) if draft else 0),
        compute=sum(compute_bytes(header, n_ctx, n_ubatch) for header in (target, drafting) if header),
    )


def kv_bytes(header: GgufHeader, n_ctx: int) -> int:
    """Of the attention's cache; an upper bound, as sliding windows and recurrent layers take less."""
    n_layer = int(_number(header.get("block_count", 0)))
    rank = int(_number(header.get("attention.kv_lora_rank", 0)))
    if rank:  # latent attention keeps one compressed row per token
        row = rank + int(_number(header.get("rope.dimension_count", 64)))
        return n_layer * n_ctx * _KV_BYTES * row
    return _n_kv_heads(header, n_layer) * _row_elements(header) * n_ctx * _KV_BYTES


def query_width(header: GgufHeader) -> int:
    """Elements of all heads' queries, summed over layers: what attention multiplies with each key and value.

    An upper bound, as of recurrent layers it counts those of attention.
    """
    n_layer = int(_number(header.get("block_count", 0)))
    heads = header.get("attention.head_count", 1)
    n_head = sum(map(int, heads)) if isinstance(heads, list) else n_layer * int(heads)
    rank = int(_number(header.get("attention.kv_lora_rank", 0)))
    if rank:  # latent attention: each head with the compressed row, and its part without positions
        return n_head * (2 * rank + int(_number(header.get("rope.dimension_count", 64)))) // 2
    return n_head * _row_elements(header) // 2


def has_tail(header: GgufHeader) -> bool:
    """Whether llama-server computes a prompt's last tokens on their own, as it cannot take back later ones:
    keys beyond a window are gone, and recurrent layers have one state."""
    return bool(header.get("attention.sliding_window")) or is_recurrent(header)


def is_recurrent(header: GgufHeader) -> bool:
    """Whether some layers have one state in place of keys and values."""
    return any(_RECURRENT.search(tensor.name) for tensor in header.tensors)


def context_bytes(header: GgufHeader, n_ubatch: int = N_UBATCH) -> int:
    """What one more token of a context takes: its keys and values, and its column of the mask."""
    return kv_bytes(header, 1) + n_ubatch * _MASK_BYTES


def compute_bytes(header: GgufHeader, n_ctx: int, n_ubatch: int = N_UBATCH) -> int:
    """Of one context's buffers for a full batch, whose logits are few: an estimate, mostly too high."""
    n_rows = min(n_ubatch, n_ctx)
    n_used = int(_number(header.get("expert_used_count", 0)))
    n_ffn = max(
        int(_number(header.get("feed_forward_length", 0))),
        int(_number(header.get("expert_feed_forward_length", 0))) * n_used,
    )
    n_embd = int(_number(header.get("embedding_length", 0)))
    per_row = _F32_BYTES * (_N_INPUT_ROWS * n_embd + _N_FFN_ROWS * n_ffn) + _MASK_BYTES * n_ctx
    return n_rows * per_row


def _row_elements(header: GgufHeader) -> int:
    """Of one head's key and value, of one token."""
    n_head = max(1, int(_number(header.get("attention.head_count", 1))))
    head = int(_number(header.get("embedding_length", 0))) // n_head
    names = ("attention.key_length", "attention.value_length")
    return sum(int(_number(header.get(name, head))) for name in names)


def _n_kv_heads(header: GgufHeader, n_layer: int) -> int:
    """Summed over layers; some architectures give one value per layer."""
    value = header.get("attention.head_count_kv", header.get("attention.head_count", 1))
    return sum(map(int, value)) if isinstance(value, list) else n_layer * int(value)


def _number(value: Any) -> float:
    return max(value, default=0) if isinstance(value, list) else float(value)
