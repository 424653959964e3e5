"""One visit of a contender: warm-up and measured tokens in a new context."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from arms import Arm
from bench import N_PROMPT, Bench, new_context
from replay import Replay, ReplayDrafts

from pyspac.engine.step import StepRecord
from pyspac.forward.context import Context
from pyspac.forward.split import Split

COUNTERS = (
    "n_hit_rows",
    "n_miss_rows",
    "n_late_rows",
    "n_loads",
    "n_evictions",
    "loaded_bytes",
    "load_us",
    "dispatch_us",
    "wait_us",
    "n_forward",
    "n_forward_both",
    "n_pinned_steals",
)
LAYER_TIMES = ("host_us", "device_us", "layer_us")


@dataclass(slots=True)
class Probe:
    """Gives the split its turn, and keeps times and counters where warm-up ends."""

    split: Split | None
    n_warm: int
    n_tokens: int = 1  # the prompt's logits gave the first one
    marks: list[tuple[float, int, dict[str, int]]] = field(default_factory=list)  # (s, tokens, counters)
    widths: list[int] = field(default_factory=list)  # of the measured steps' batches

    def after_prompt(self) -> None:
        if self.split:
            self.split.after_prompt()

    def after_step(self, step: StepRecord) -> None:
        if self.split:
            self.split.after_step(step)
        self.n_tokens += 1 + step.n_accepted
        if self.marks:
            self.widths.append(step.n_tokens)
        elif self.n_tokens >= self.n_warm:
            self.mark()

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), self.n_tokens, self._counters()))

    def _counters(self) -> dict[str, int]:
        if self.split is None:
            return {}
        board = self.split.engine.board
        values = {name: int(board.counters[0][name]) for name in COUNTERS}
        return values | {name: int(board.layer_stats[name].sum()) for name in LAYER_TIMES}


@dataclass(slots=True)
class Visit:
    """What one visit of a contender measured, over the tokens after the warm-up."""

    seconds: float
    n_tokens: int
    n_steps: int
    mean_width: float
    counters: dict[str, int]
    agreement: float
    pool_bytes: int
    scheduler_us: float | None

    @property
    def tps(self) -> float:
        return self.n_tokens / self.seconds


@contextlib.contextmanager
def opened(bench: Bench, arm: Arm) -> Iterator[tuple[Context, Split | None, int]]:
    """Context, split or None, and the longest draft of this contender."""
    options = arm.options(bench.path, bench.s)
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(new_context(bench, arm.placement))
        split = stack.enter_context(Split(context.ptr, bench.device, options)) if arm.is_split else None
        yield context, split, options.width - 1


def visit(bench: Bench, arm: Arm, n_predict: int | None = None) -> Visit:
    """Warm-up and measured tokens of one contender, in a new context."""
    with opened(bench, arm) as (context, split, n_draft):
        probe = Probe(split, bench.s.warm_up)
        drafts = ReplayDrafts(bench.reference, bench.s.acceptance, bench.s.seed, bench.s.draft_ms)
        replay = Replay(context, drafts)
        replay.read(N_PROMPT)
        probe.after_prompt()
        n_end = N_PROMPT + (n_predict or bench.n_predict)
        while replay.n_known < n_end:
            probe.after_step(replay.step(min(n_draft, n_end - replay.n_known - 1)))
        probe.mark()
        (t0, n0, before), (t1, n1, after) = probe.marks[0], probe.marks[-1]
        return Visit(
            seconds=t1 - t0,
            n_tokens=n1 - n0,
            n_steps=len(probe.widths),
            mean_width=float(np.mean(probe.widths)) if probe.widths else float("nan"),
            counters={name: after[name] - before[name] for name in before},
            agreement=replay.agreement,
            pool_bytes=split.info.pool_bytes if split else 0,
            scheduler_us=split.scheduler.stats().step_p50_us if split and split.scheduler else None,
        )
