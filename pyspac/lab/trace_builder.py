"""Forward passes as they were recorded in, a Trace out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyspac.lab.trace import EARLY_MAX, NOT_RUN, TokenStatus, Trace, TraceError, TraceGeometry
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import GgufHeader, read_header

Array = npt.NDArray[Any]


@dataclass(slots=True)
class RoutedLayer:
    """One layer's router in one forward pass: rows are tokens."""

    experts: Array  # [n, n_expert_used] int32
    weights: Array | None = None  # [n, n_expert_used] float32
    logits: Array | None = None  # [n, n_expert] float32
    early: Array | None = None  # [EARLY_MAX, n, n_expert] by the inputs of routers before; NaN: there is none
    draft: Array | None = None  # [n, n_expert] by the draft model's inputs; NaN where it has none


@dataclass(slots=True)
class Pass:
    """One forward pass."""

    layers: dict[int, RoutedLayer] = field(default_factory=dict)
    position: int = 0
    n_token: int = 0
    n_kept: int = 0  # tokens that were not taken back
    tokens: Sequence[int] = ()  # their ids


def trace_geometry(path: Path) -> TraceGeometry:
    """Read a model's geometry from its file; TraceError if it is dense."""
    header = read_header(path)
    geometry = read_geometry(header)
    if not geometry.is_moe:
        raise TraceError(f"{path}: this model is dense; it has no routing to trace")
    layouts = {layout: i for i, layout in enumerate(dict.fromkeys(x.layout for x in geometry.moe_layers))}
    return TraceGeometry(
        model=path.name,
        architecture=geometry.architecture,
        n_layer=geometry.n_layer,
        n_expert=geometry.n_expert,
        n_expert_used=geometry.n_expert_used,
        expert_bytes=tuple(x.expert_bytes for x in geometry.layers),
        dense_bytes=_dense_bytes(header, geometry.n_layer),
        group=tuple(layouts.get(x.layout, 0) for x in geometry.layers),
    )


def _dense_bytes(header: GgufHeader, n_layer: int) -> tuple[int, ...]:
    sizes = [0] * n_layer
    for tensor in header.tensors:
        match = re.match(r"blk\.(\d+)\.", tensor.name)
        if match and "_exps" not in tensor.name and int(match[1]) < n_layer:
            sizes[int(match[1])] += tensor.n_bytes
    return tuple(sizes)


def build_trace(geometry: TraceGeometry, passes: list[Pass], n_prompt: int) -> Trace:
    """Lay passes out token by token. A layer that ran for the last tokens only is NOT_RUN for the others."""
    layers = [layer for one in passes for layer in one.layers.values()]
    if not layers:
        raise TraceError("no router was seen: the graph of this architecture gives its nodes other names")
    has_prompt = [one.position < n_prompt for one in passes]
    n_pieces = has_prompt.index(False) if False in has_prompt else len(passes)
    n, n_layer = sum(one.n_token for one in passes), geometry.n_layer
    per_choice, per_expert = (n, n_layer, geometry.n_expert_used), (n, n_layer, geometry.n_expert)
    arrays: dict[str, Any] = {
        "experts": np.full(per_choice, NOT_RUN, np.int16),
        "weights": np.zeros(per_choice, np.float32),
    }
    if any(layer.logits is not None for layer in layers):
        arrays["logits"] = np.full(per_expert, np.nan, np.float16)
    if any(layer.early is not None for layer in layers):
        arrays["early_logits"] = np.full((EARLY_MAX, *per_expert), np.nan, np.float16)
    if any(layer.draft is not None for layer in layers):
        arrays["draft_logits"] = np.full(per_expert, np.nan, np.float16)
    _fill(arrays, passes)
    return Trace(
        geometry=geometry,
        step=np.repeat(np.arange(len(passes)), [p.n_token for p in passes]).astype(np.int32),
        position=np.concatenate([p.position + np.arange(p.n_token) for p in passes]).astype(np.int32),
        status=np.concatenate([_status(p, is_prompt=i < n_pieces) for i, p in enumerate(passes)]),
        token_id=np.array([token for p in passes for token in p.tokens], np.int32),
        **arrays,
    )


def _fill(arrays: dict[str, Any], passes: list[Pass]) -> None:
    """Copy what the layers' routers gave to the rows of their tokens."""
    end = 0
    for one in passes:
        end += one.n_token
        for il, layer in one.layers.items():
            at = slice(end - len(layer.experts), end)
            arrays["experts"][at, il, : layer.experts.shape[1]] = layer.experts
            for name, rows in (
                ("weights", layer.weights), ("logits", layer.logits), ("early_logits", layer.early),
                ("draft_logits", layer.draft),
            ):  # fmt: skip
                if rows is not None:
                    arrays[name][..., at, il, :] = rows


def _status(one: Pass, *, is_prompt: bool) -> npt.NDArray[np.uint8]:
    """A step verifies the last emitted token and its drafts; what was taken back was rejected."""
    if is_prompt:
        return np.full(one.n_token, TokenStatus.PROMPT, np.uint8)
    status = np.full(one.n_token, TokenStatus.REJECTED, np.uint8)
    status[: one.n_kept] = TokenStatus.ACCEPTED
    status[0] = TokenStatus.SAMPLED
    return status
