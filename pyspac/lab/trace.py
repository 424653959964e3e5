"""Routing traces: which experts each token used in each layer, as arrays.

A `Trace` holds one row per token that was routed: [n_token, n_layer, n_expert_used] experts and router
weights, optionally all router logits and the next layer's router applied early.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from pyspac.errors import PyspacError

NOT_RUN: Final = -1  # in `experts`: the layer did not run for this token, or is dense
EARLY_MAX: Final = 3  # layers ahead that early logits are recorded for


class TraceError(PyspacError):
    """A trace file cannot be used: missing, of another format, cut off, or without what is asked for."""

    exit_code = 2


class TokenStatus(IntEnum):
    """What became of a token: part of the prompt, the target's own choice, or a draft's fate."""

    PROMPT = 0
    SAMPLED = 1
    ACCEPTED = 2
    REJECTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGeometry:
    """The traced model. Lists are per layer; a dense layer has `expert_bytes` 0."""

    model: str
    architecture: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    expert_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]  # read for every token, whatever the router says
    group: tuple[int, ...] = ()  # layout group; (): layers with equal expert_bytes share one

    def __post_init__(self) -> None:
        for name, sizes in (("expert_bytes", self.expert_bytes), ("dense_bytes", self.dense_bytes)):
            if len(sizes) != self.n_layer:
                raise TraceError(f"the trace has {len(sizes)} {name}, but {self.n_layer} layers")
        if min(self.n_layer, self.n_expert, self.n_expert_used) < 1 or self.n_expert_used > self.n_expert:
            raise TraceError(
                f"the trace's geometry makes no sense: it says {self.n_layer} layers and {self.n_expert} "
                f"experts, of which a token uses {self.n_expert_used}"
            )
        if not self.group:
            first_seen = {size: i for i, size in enumerate(dict.fromkeys(b for b in self.expert_bytes if b))}
            object.__setattr__(self, "group", tuple(first_seen.get(size, 0) for size in self.expert_bytes))

    @property
    def n_moe_layer(self) -> int:
        """Layers with experts."""
        return sum(size > 0 for size in self.expert_bytes)

    @property
    def total_bytes(self) -> int:
        """All experts of all layers."""
        return self.n_expert * sum(self.expert_bytes)

    def with_own_slots(self) -> TraceGeometry:
        """Return the same model with a layout group for each layer that has experts."""
        nth = np.cumsum([size > 0 for size in self.expert_bytes]) - 1
        return replace(
            self, group=tuple(int(n) if size else 0 for n, size in zip(nth, self.expert_bytes, strict=True))
        )

    @property
    def n_group(self) -> int:
        """Layout groups; slots are shared within a group only."""
        return max(self.group) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Tokens in the order they were computed; a step is one forward pass of the target."""

    geometry: TraceGeometry
    step: npt.NDArray[np.int32]  # [n_token] forward pass, rising; prompt pieces have their own
    position: npt.NDArray[np.int32]  # [n_token] in the sequence
    status: npt.NDArray[np.uint8]  # [n_token] TokenStatus
    # [n_token] ids of the vocabulary; None: not recorded
    token_id: npt.NDArray[np.int32] | None = None
    experts: npt.NDArray[np.int16]  # [n_token, n_layer, n_expert_used], best first; NOT_RUN: none
    weights: npt.NDArray[np.float32]  # the same shape
    logits: npt.NDArray[np.float16] | None = None  # [n_token, n_layer, n_expert] of the router
    # [d, n_token, n_layer, n_expert] the same, from the router input of the layer 1 .. d routers before
    early_logits: npt.NDArray[np.float16] | None = None
    # [n_token, n_layer, n_expert] from the draft model's router input; NaN: it did not compute the token
    draft_logits: npt.NDArray[np.float16] | None = None
    source: str = field(default="", compare=False)  # file it was read from

    def __post_init__(self) -> None:
        g, n = self.geometry, len(self.step)
        shape = (n, g.n_layer, g.n_expert_used)
        if self.experts.shape != shape or self.weights.shape != shape:
            raise TraceError(f"the trace's experts have the shape {self.experts.shape}; it should be {shape}")
        if n == 0:
            raise TraceError("the trace holds no token")
        if np.any(np.diff(self.step) < 0):
            raise TraceError("the trace's steps do not rise from token to token")
        if self.experts.max() >= g.n_expert or self.experts.min() < NOT_RUN:
            raise TraceError(f"the trace names experts outside 0 .. {g.n_expert - 1}")

    def without(self, column: str, how: str) -> TraceError:
        """Return what to raise where this trace lacks a column; `how`: the option of `pyspac trace`."""
        return TraceError(
            f"{self.source or 'this trace'} holds no {column}, which this needs: record it with "
            f"`pyspac trace{how}`"
        )

    @property
    def n_token(self) -> int:
        """Tokens computed, rejected drafts included."""
        return len(self.step)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return int(np.count_nonzero(self.status == TokenStatus.PROMPT))

    @property
    def has_drafts(self) -> bool:
        """Whether drafted tokens were verified while recording."""
        return bool(np.any(self.status > TokenStatus.SAMPLED))


def softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return [n, n_expert] the probabilities that belong to rows of a router's logits."""
    z = logits.astype(np.float64)
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))
