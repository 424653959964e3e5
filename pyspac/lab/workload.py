"""Trace in, steps of decoding out: which experts each layer asks for in each forward pass.

Drafts: a trace recorded with drafts keeps its steps (k = None). With a k, drafts of that length are
emulated over the tokens that were emitted: a step verifies the next k + 1 tokens of the trace and moves on
by 1 + accepted, where each drafted token is accepted with a fixed probability until the first rejection
(seeded). The rejected tokens' experts are those of the tokens that really followed, a fair stand-in while
drafter and target mostly agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from pyspac.errors import ConfigError
from pyspac.lab.demand import NEVER, Demand
from pyspac.lab.trace import NOT_RUN, TokenStatus, Trace

Phase = Literal["decode", "all"]
DEFAULT_ACCEPT: Final = 0.7
MAX_DRAFT: Final = 64


@dataclass(slots=True)
class Step:
    """One forward pass of the target."""

    tokens: npt.NDArray[np.intp]  # of the trace
    n_draft: int
    n_emitted: int  # tokens of output it yields
    layers: list[Demand]


@dataclass(slots=True)
class Workload:
    """A trace as steps, with the times (step * n_layer + il) at which each expert is asked for."""

    trace: Trace
    k: int  # longest draft
    steps: list[Step]
    prompt: Step | None
    first_use: npt.NDArray[np.int64]  # [n_layer * n_expert], or NEVER
    use_times: npt.NDArray[np.int64]  # all of them, expert by expert
    use_end: npt.NDArray[np.int64]  # [n_layer * n_expert] where each expert's times end

    @property
    def n_emitted(self) -> int:
        """Tokens of output over all steps."""
        return sum(step.n_emitted for step in self.steps)


def make_workload(
    trace: Trace, k: int | None = None, accept: float = DEFAULT_ACCEPT, phase: Phase = "decode", seed: int = 0
) -> Workload:
    """Return the steps; phase "all" begins with the prompt as one forward pass under the same policies."""
    if k is not None and not 0 <= k <= MAX_DRAFT:
        raise ConfigError("--k", k, f"0 .. {MAX_DRAFT}")
    if not 0.0 <= accept <= 1.0:
        raise ConfigError("--accept", accept, "0 .. 1")
    prompt = np.flatnonzero(trace.status == TokenStatus.PROMPT)
    windows = _recorded_windows(trace) if k is None else _emulated_windows(trace, k, accept, seed)
    if not windows:
        raise ConfigError("trace", trace.source, "a trace with at least one generated token")
    steps = [Step(tokens, n_draft, n_emitted, []) for tokens, n_draft, n_emitted in windows]
    prompt_step = Step(prompt, 0, 0, []) if len(prompt) else None
    if prompt_step is not None:
        prompt_step.layers = _demands(trace, prompt)
    for step in steps:
        step.layers = _demands(trace, step.tokens)
    if phase == "all" and prompt_step is not None:
        steps.insert(0, prompt_step)
    first_use = _link_uses(trace, steps)
    k_max = max(step.n_draft for step in steps)
    return Workload(trace, k_max, steps, prompt_step, first_use, *_use_times(trace, steps))


Windows = list[tuple[npt.NDArray[np.intp], int, int]]  # tokens, n_draft, n_emitted


def _recorded_windows(trace: Trace) -> Windows:
    """Steps as they were recorded: the last sampled token, then its drafts."""
    decoded = np.flatnonzero(trace.status != TokenStatus.PROMPT)
    steps = trace.step[decoded]
    parts = np.split(decoded, np.flatnonzero(np.diff(steps)) + 1) if len(decoded) else []
    status = trace.status
    return [
        (part, len(part) - 1, 1 + int(np.count_nonzero(status[part] == TokenStatus.ACCEPTED)))
        for part in parts
    ]


def _emulated_windows(trace: Trace, k: int, accept: float, seed: int) -> Windows:
    emitted = (trace.status == TokenStatus.SAMPLED) | (trace.status == TokenStatus.ACCEPTED)
    decoded = np.flatnonzero(emitted)
    rng = np.random.default_rng(seed)
    windows: Windows = []
    at = 0
    while at < len(decoded):
        tokens = decoded[at : at + k + 1]
        n_accepted = int(np.cumprod(rng.random(k) < accept).sum()) if k else 0
        n_accepted = min(n_accepted, len(tokens) - 1)
        windows.append((tokens, len(tokens) - 1, 1 + n_accepted))
        at += 1 + n_accepted
    return windows


def _demands(trace: Trace, tokens: npt.NDArray[np.intp]) -> list[Demand]:
    """Return what each MoE layer is asked for by these tokens; a layer that nobody runs is left out."""
    g = trace.geometry
    demands = []
    for il in range(g.n_layer):
        if g.expert_bytes[il] == 0:
            continue
        experts = trace.experts[tokens, il]  # [n_token, n_expert_used]
        ran = experts != NOT_RUN
        if ran.any():
            rank = np.broadcast_to(np.arange(experts.shape[1]), experts.shape)[ran]
            demands.append(
                _demand(
                    il, il * g.n_expert + experts[ran].astype(np.intp), trace.weights[tokens, il][ran], rank
                )
            )
    return demands


def _demand(
    il: int, keys: npt.NDArray[np.intp], weight: npt.NDArray[np.float32], rank: npt.NDArray[np.intp]
) -> Demand:
    """Fold (token, expert) pairs into distinct experts, in the order of their first appearance."""
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rows = np.bincount(inverse, minlength=len(distinct))
    weights = np.bincount(inverse, weight, len(distinct)).astype(np.float64)
    best = np.full(len(distinct), 2**31, np.int64)
    np.minimum.at(best, inverse, rank)
    return Demand(
        il, distinct[order], rows[order].astype(np.int64), weights[order], best[order], np.zeros(0, np.int64)
    )


def _link_uses(trace: Trace, steps: list[Step]) -> npt.NDArray[np.int64]:
    """Fill `next_use` of every demand, back to front; return the first use of every expert."""
    g = trace.geometry
    next_use = np.full(g.n_layer * g.n_expert, NEVER, np.int64)
    for i in range(len(steps) - 1, -1, -1):
        for demand in steps[i].layers:  # keys of different layers never meet
            demand.next_use = next_use[demand.keys]
            next_use[demand.keys] = i * g.n_layer + demand.il
    return next_use


def _use_times(trace: Trace, steps: list[Step]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    g = trace.geometry
    demands = [(i * g.n_layer + d.il, d.keys) for i, step in enumerate(steps) for d in step.layers]
    keys = np.concatenate([k for _, k in demands])
    times = np.repeat([t for t, _ in demands], [len(k) for _, k in demands])
    order = np.argsort(keys, kind="stable")
    return times[order], np.cumsum(np.bincount(keys, minlength=g.n_layer * g.n_expert))


@lru_cache(maxsize=16)
def cached_workload(source: str, k: int | None, accept: float, phase: Phase, seed: int) -> Workload:
    """Return `make_workload` of a trace file, once per process."""
    return make_workload(_cached_trace(source), k, accept, phase, seed)


@lru_cache(maxsize=4)
def _cached_trace(source: str) -> Trace:
    from pathlib import Path

    from pyspac.lab.trace import read_trace

    return read_trace(Path(source))
