"""Tiny traces, written out by hand: tokens x layers x experts in, a Trace out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyspac.lab.events import Evicted
from pyspac.lab.machine import PRESETS, Machine
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.trace import NOT_RUN, TokenStatus, Trace, TraceGeometry
from pyspac.lab.workload import make_workload

MIB = 1 << 20
Token = Sequence[Sequence[int]]  # experts per layer


def make_trace(tokens: Sequence[Token], n_expert: int = 8, **fields: Any) -> Trace:
    """One token per step; experts of 1 MiB, one layout group, equal router weights unless given."""
    n_layer = len(tokens[0])
    n_used = max(len(experts) for token in tokens for experts in token)
    experts = np.full((len(tokens), n_layer, n_used), NOT_RUN, np.int16)
    for i, token in enumerate(tokens):
        for il, chosen in enumerate(token):
            experts[i, il, : len(chosen)] = chosen
    geometry = TraceGeometry(
        model="tiny.gguf", architecture="test", n_layer=n_layer, n_expert=n_expert, n_expert_used=n_used,
        expert_bytes=(MIB,) * n_layer, dense_bytes=(MIB,) * n_layer,
    )  # fmt: skip
    defaults: dict[str, Any] = {
        "step": np.arange(len(tokens), dtype=np.int32),
        "position": np.arange(len(tokens), dtype=np.int32),
        "status": np.full(len(tokens), TokenStatus.SAMPLED, np.uint8),
        "weights": np.where(experts == NOT_RUN, 0, 1 / n_used).astype(np.float32),
    }
    return Trace(geometry=geometry, experts=experts, **(defaults | fields))


def one_layer(sequence: str, n_expert: int = 8) -> Trace:
    """A trace of one layer and one expert per token: "abac"."""
    return make_trace([[[ord(c) - ord("a")]] for c in sequence], n_expert)


class Observed(Run):
    """A run that notes who was evicted, in order."""

    left: list[int]


def observe(
    trace: Trace, n_slots: int, machine: Machine | str = "instant", k: int | None = 0, **policies: Any
) -> Observed:
    """Run policies with room for n_slots experts; `left` holds the evicted keys."""
    found = PRESETS[machine] if isinstance(machine, str) else machine
    run = Observed(make_workload(trace, k), Setup(capacity=str(n_slots), **policies), found)
    run.left = []
    on_evicted = run.policies.eviction.on_evicted

    def note(event: Evicted) -> None:
        run.left.append(event.key)
        on_evicted(event)

    run.policies.eviction.on_evicted = note  # type: ignore[method-assign]
    run.run()
    return run


def letters(keys: Sequence[int]) -> str:
    """Keys of a one-layer trace as letters."""
    return "".join(chr(ord("a") + key) for key in keys)
