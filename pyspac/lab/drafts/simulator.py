"""Simulated decode streams, to compare controllers where costs and acceptances are known.

A stream is a text whose tokens a drafter would guess or not, drawn once: every controller meets the same text
and the same luck. Times come from a given T(n) with noise. All results are simulated, none is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Costs in microseconds. verify_us[n - 1] is T(n), for all tokens of a batch; a step in it is a switch of
    kernels."""

    verify_us: Sequence[float]
    draft_us: float = 0.0  # per drafted token
    catch_up_us: float = 0.0  # per token that the drafter has to read before it can draft
    process_us: float = 20.0
    switch_us: float = 0.0  # of a pass whose width differs from the one before
    noise: float = 0.04  # sigma of log(time)
    outlier_rate: float = 0.005
    outlier_factor: float = 4.0
    drift: float = 0.0  # of log(verify), over the stream; a longer context (> 0), a warmer cache (< 0)
    slow_rate: float = 0.0  # chance per step that another program comes to the same core, or goes
    slow_factor: float = 1.7  # of all passes while it is there


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
    """Runs one controller per sequence through a text each, on one machine; a step is one batch of all.

    In every step each sequence that is not done drafts, one batch verifies all drafts, and each controller
    hears of its own. Times are the batch's: what one sequence drafts, all wait for.
    """

    def __init__(
        self,
        machine: Machine,
        texts: Sequence[Text],
        controllers: Sequence[Controller],
        *,
        seed: int,
        lag_steps: int = 0,
    ) -> None:
        """`lag_steps`: 0 or 1."""
        self.machine = machine
        self.sequences = [_Sequence(*pair) for pair in zip(texts, controllers, strict=True)]
        self.rng = np.random.default_rng(seed)
        self.lag_steps = lag_steps
        self._last_width = -1
        self._is_slow = False

    def run(self) -> Result:
        result = Result()
        running = self.sequences
        while running := [sequence for sequence in running if not sequence.is_done()]:
            drafts = [sequence.draft(self.lag_steps) for sequence in running]
            width = len(running) + sum(n for n, _ in drafts)
            draft_us = [self._draft_us(s, n) for s, (n, _) in zip(running, drafts, strict=True)]
            verify_us = self._verify_us(width, running[0].progress())
            process_us = self.machine.process_us * self._noise()
            result.total_us += sum(draft_us) + verify_us + process_us
            result.n_steps += 1
            for i, (sequence, (n_draft, n_accepted)) in enumerate(zip(running, drafts, strict=True)):
                record = StepRecord(
                    server_slot=i, n_draft=n_draft, n_accepted=n_accepted, n_tokens=width,
                    draft_us=draft_us[i], verify_us=verify_us, process_us=process_us,
                )  # fmt: skip
                sequence.observe(record)
                result.n_tokens += record.n_emitted
                result.n_drafted.append(n_draft)
        return result

    def _draft_us(self, sequence: _Sequence, n_draft: int) -> float:
        machine = self.machine
        us = machine.draft_us * n_draft + (machine.catch_up_us * sequence.n_behind if n_draft else 0.0)
        sequence.n_behind = 0 if n_draft else sequence.n_behind + 1
        return us * self._noise()

    def _verify_us(self, width: int, progress: float) -> float:
        machine = self.machine
        us = machine.verify_us[width - 1] * math.exp(machine.drift * progress)
        if width != self._last_width:
            us += machine.switch_us
        self._last_width = width
        self._is_slow ^= bool(self.rng.random() < machine.slow_rate)
        return us * self._noise() * (machine.slow_factor if self._is_slow else 1.0)

    def _noise(self) -> float:
        factor = math.exp(self.machine.noise * self.rng.standard_normal())
        return factor * (
            self.machine.outlier_factor if self.rng.random() < self.machine.outlier_rate else 1.0
        )


@dataclass(slots=True)
class _Sequence:
    """One request under way."""

    text: Text
    controller: Controller
    position: int = 0
    n_behind: int = 0  # tokens that the drafter has not read
    limit: int = 0  # of this step
    late_limit: int = 0  # what was decided for the last step and takes effect a step late

    def is_done(self) -> bool:
        return self.position >= len(self.text)

    def progress(self) -> float:
        return self.position / len(self.text)

    def draft(self, lag_steps: int) -> tuple[int, int]:
        """(n_draft, n_accepted) of the next step."""
        wanted = self.controller.next_n_draft()
        self.limit, self.late_limit = (self.late_limit, wanted) if lag_steps else (wanted, wanted)
        n_draft = self.limit if self.text.hits[self.position] else 0
        return n_draft, min(n_draft, self.text.holds[self.position])

    def observe(self, record: StepRecord) -> None:
        self.controller.observe(record)
        self.position += record.n_emitted
