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
from pathlib import Path
from typing import Final, Literal

import numpy as np

from pyspac.checks import check_range
from pyspac.errors import ConfigError
from pyspac.lab.demand import Demand, Tokens, fold
from pyspac.lab.future import Future
from pyspac.lab.trace import NOT_RUN, TokenStatus, Trace
from pyspac.lab.trace_file import read_trace

Phase = Literal["decode", "all"]
DEFAULT_ACCEPT: Final = 0.7
MAX_DRAFT: Final = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass of the target."""

    tokens: Tokens  # [n_token] the last token of the text, then the drafts
    n_draft: int
    n_emitted: int  # tokens of output it yields
    layers: list[Demand]


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace as steps."""

    trace: Trace
    k: int  # longest draft
    steps: list[Step]
    prompt: Step | None
    future: Future  # of `steps`

    @property
    def n_emitted(self) -> int:
        """Tokens of output over all steps."""
        return sum(step.n_emitted for step in self.steps)


def make_workload(
    trace: Trace, k: int | None = None, accept: float = DEFAULT_ACCEPT, phase: Phase = "decode", seed: int = 0
) -> Workload:
    """Return the steps; phase "all" begins with the prompt as one forward pass under the same policies.

    ConfigError if k or accept is out of range, or if the trace has no generated token.
    """
    if k is not None and not 0 <= k <= MAX_DRAFT:
        raise ConfigError("--k", k, f"a whole number from 0 to {MAX_DRAFT}")
    check_range("--accept", accept, 0.0, 1.0)
    windows = _recorded_windows(trace) if k is None else _emulated_windows(trace, k, accept, seed)
    if not windows:
        raise ConfigError("trace", trace.source, "a trace with at least one generated token")
    steps = [Step(*window, _demands(trace, window[0])) for window in windows]
    prompt = np.flatnonzero(trace.status == TokenStatus.PROMPT)
    prompt_step = Step(prompt, 0, 0, _demands(trace, prompt)) if len(prompt) else None
    if phase == "all" and prompt_step is not None:
        steps.insert(0, prompt_step)
    g = trace.geometry
    future = Future([step.layers for step in steps], g.n_layer, g.n_layer * g.n_expert)
    return Workload(trace, max(step.n_draft for step in steps), steps, prompt_step, future)


Windows = list[tuple[Tokens, int, int]]  # tokens, n_draft, n_emitted


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
    """Steps of up to k drafts over the tokens that were emitted."""
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


def _demands(trace: Trace, tokens: Tokens) -> list[Demand]:
    """Return what each MoE layer is asked for by these tokens; a layer that does not run is left out."""
    g = trace.geometry
    demands = []
    for il in range(g.n_layer):
        if g.expert_bytes[il] == 0:
            continue
        experts = trace.experts[tokens, il]  # [n_token, n_expert_used]
        ran = experts != NOT_RUN
        if ran.any():
            rank = np.broadcast_to(np.arange(experts.shape[1]), experts.shape)[ran]
            keys = il * g.n_expert + experts[ran].astype(np.intp)
            demands.append(fold(il, keys, trace.weights[tokens, il][ran], rank))
    return demands


@lru_cache(maxsize=16)
def cached_workload(source: str, k: int | None, accept: float, phase: Phase, seed: int) -> Workload:
    """Return `make_workload` of a trace file, once per process."""
    return make_workload(_cached_trace(source), k, accept, phase, seed)


@lru_cache(maxsize=4)
def _cached_trace(source: str) -> Trace:
    return read_trace(Path(source))
