"""Simulated decode streams, to compare controllers where costs and acceptances are known.

A stream is a text whose tokens a drafter would guess or not, drawn once: every controller meets the same text
and the same luck. Times come from a given T(n) with noise. All results are simulated, none is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyspac.engine.step import StepRecord
from pyspac.speculation.controller import Controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of text. `acceptance`: chance that position 1, 2, ... of a draft holds given all before do;
    the last one holds for all beyond."""

    n_tokens: int
    acceptance: Sequence[float]
    hit_rate: float = 1.0  # share of positions at which the drafter has anything to say


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Costs in microseconds. verify_us[n - 1] is T(n); a step in it is a switch of kernels."""

    verify_us: Sequence[float]
    draft_us: float = 0.0  # per drafted token
    catch_up_us: float = 0.0  # per token that the drafter has to read before it can draft
    process_us: float = 20.0
    switch_us: float = 0.0  # of a pass whose width differs from the one before
    noise: float = 0.04  # sigma of log(time)
    outlier_rate: float = 0.005
    outlier_factor: float = 4.0
    drift: float = 0.0  # of log(verify), over the stream; a longer context (> 0), a warmer cache (< 0)


@dataclass(slots=True)
class Result:
    """One simulated run."""

    n_tokens: int = 0
    n_steps: int = 0
    total_us: float = 0.0
    n_drafted: list[int] = field(default_factory=list)  # per step

    @property
    def tokens_per_s(self) -> float:
        return 1e6 * self.n_tokens / self.total_us


class Text:
    """How far a draft at each position would hold, for a whole stream; [n_tokens] int."""

    def __init__(self, phases: Sequence[Phase], n_max: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.holds: list[int] = []
        self.hits: list[bool] = []
        for phase in phases:
            curve = [phase.acceptance[min(i, len(phase.acceptance) - 1)] for i in range(n_max)]
            luck = rng.random((phase.n_tokens, n_max)) < curve
            self.holds += [int(n) for n in np.cumprod(luck, axis=1).sum(axis=1)]
            self.hits += [bool(hit) for hit in rng.random(phase.n_tokens) < phase.hit_rate]

    def __len__(self) -> int:
        return len(self.holds)


class Simulation:
    """Runs one controller through one text on one machine."""

    def __init__(
        self, machine: Machine, text: Text, controller: Controller, *, seed: int, shadow: bool
    ) -> None:
        """`shadow`: the drafter is free, and watched if the controller wants it."""
        self.machine, self.text, self.controller = machine, text, controller
        self.rng = np.random.default_rng(seed)
        self.has_shadow = shadow and controller.wants_shadow
        self._n_behind = 0  # tokens that the drafter has not read
        self._last_n_draft = -1

    def run(self) -> Result:
        result = Result()
        position = 0
        while position < len(self.text):
            limit = self.controller.next_n_draft()
            n_draft = limit if self.text.hits[position] else 0
            n_accepted = min(n_draft, self.text.holds[position])
            record = self._record(n_draft, n_accepted, position / len(self.text))
            self._observe(record, position, limit)
            position += record.n_emitted
            result.n_tokens += record.n_emitted
            result.n_steps += 1
            result.total_us += record.total_us
            result.n_drafted.append(n_draft)
        return result

    def _record(self, n_draft: int, n_accepted: int, progress: float) -> StepRecord:
        machine = self.machine
        draft_us = machine.draft_us * n_draft + (machine.catch_up_us * self._n_behind if n_draft else 0.0)
        self._n_behind = 0 if n_draft else self._n_behind + 1
        verify_us = machine.verify_us[n_draft] * math.exp(machine.drift * progress)
        if n_draft != self._last_n_draft:
            verify_us += machine.switch_us
        self._last_n_draft = n_draft
        return StepRecord(
            n_draft=n_draft,
            n_accepted=n_accepted,
            draft_us=draft_us * self._noise(),
            verify_us=verify_us * self._noise(),
            process_us=machine.process_us * self._noise(),
        )

    def _noise(self) -> float:
        factor = math.exp(self.machine.noise * self.rng.standard_normal())
        return factor * (
            self.machine.outlier_factor if self.rng.random() < self.machine.outlier_rate else 1.0
        )

    def _observe(self, record: StepRecord, position: int, limit: int) -> None:
        if self.has_shadow and limit == 0:  # a step earlier than in truth, where the text must come first
            if self.text.hits[position]:
                n_max = self.controller.n_draft_max
                self.controller.observe_shadow(n_max, min(n_max, self.text.holds[position]))
            else:
                self.controller.observe_shadow(0, 0)
        self.controller.observe(record)


def simulate(
    machine: Machine,
    phases: Sequence[Phase],
    make: Callable[[], Controller],
    *,
    n_max: int,
    seed: int,
    shadow: bool = False,
) -> Result:
    """One run; equal seeds give every controller the same text."""
    text = Text(phases, n_max, seed)
    return Simulation(machine, text, make(), seed=seed + 1, shadow=shadow).run()
