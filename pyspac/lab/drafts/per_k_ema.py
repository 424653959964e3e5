"""A moving average of tokens per second for each draft length of a ladder, with an occasional probe.

Costs have steps where hill climbing sticks, so keep a memory for each of {0, 1, 2, 3, 5, 8} and use
the best; every now and then try a neighbour on the ladder, less often while that does not pay. The knob is
the gain of the averages.
"""

from __future__ import annotations

from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.speculation.controller import Controller, Phase, Shared
from pyspac.speculation.utility import Window

LADDER: Final = (0, 1, 2, 3, 5, 8)
GAIN: Final = 0.3  # of one window
N_BASELINE_STEPS: Final = 4
N_WINDOW_STEPS: Final = 4
PROBE_DISTANCE: Final = 24  # steps between probes at first
PROBE_DISTANCE_MAX: Final = 192
CLIMB_SHARE: Final = 0.6  # of the best rate; a first try below it ends the climb up the ladder


class PerKEma(Controller):
    """One request; nothing is kept for the next."""

    name = "per-k-ema"

    def __init__(self, shared: Shared) -> None:
        """Begin with plain steps, then climb the ladder."""
        super().__init__(shared)
        self.ladder = ladder(shared.n_draft_max)
        self.rates: dict[int, float] = {}  # draft length -> tokens per microsecond
        self._untried = list(self.ladder[1:])
        self._distance = PROBE_DISTANCE
        self._since_probe = 0
        self._probe_up = True
        self._enter("baseline", 0, N_BASELINE_STEPS, "plain steps to compare with")

    def next_n_draft(self) -> int:
        return self._n_draft

    def _enter(self, phase: Phase, n_draft: int, n_steps: int, why: str) -> None:
        self.phase, self._n_draft, self._n_left = phase, n_draft, n_steps
        self._n_unsettled = self.shared.lag_steps
        self._window = Window()
        base = self.rates.get(0)
        utilities = {k: rate / base for k, rate in self.rates.items()} if base else {}
        self._decide(phase, n_draft, n_steps=n_steps, utilities=utilities, why=why)

    def _observe(self, record: StepRecord) -> None:
        self._since_probe += 1
        if self._n_unsettled:
            self._n_unsettled -= 1
            return
        self._window.add(record)
        self._n_left -= 1
        if self._n_left == 0:
            self._end_window()

    def _end_window(self) -> None:
        rate = self._window.n_emitted / max(self._window.total_us, 1e-9)
        old = self.rates.get(self._n_draft)
        self.rates[self._n_draft] = rate if old is None else old + GAIN * (rate - old)
        best = self._best()
        if self._untried and self.phase in ("baseline", "test"):
            self._climb(rate)
        elif self.phase == "probe":
            self._end_probe(best)
        elif self._since_probe >= self._distance and len(self.ladder) > 1:
            self._since_probe = 0
            self._enter("probe", self._neighbour(best), N_WINDOW_STEPS, "a neighbour")
        else:
            self._enter("set", best, N_WINDOW_STEPS, "the best average")

    def _best(self) -> int:
        return max(self.rates, key=lambda k: self.rates[k])

    def _climb(self, rate: float) -> None:
        if rate < CLIMB_SHARE * self.rates[self._best()]:
            self._untried = []
            self._enter("set", self._best(), N_WINDOW_STEPS, "the next ones promise nothing")
        else:
            self._enter("test", self._untried.pop(0), N_WINDOW_STEPS, "the next on the ladder")

    def _end_probe(self, best: int) -> None:
        if best == self._n_draft:
            self._distance = PROBE_DISTANCE
        else:
            self._distance = min(2 * self._distance, PROBE_DISTANCE_MAX)
        self._enter("set", best, N_WINDOW_STEPS, "the best average")

    def _neighbour(self, k: int) -> int:
        """Up and down in turn, where there is one."""
        i = self.ladder.index(k)
        self._probe_up = not self._probe_up
        up = (self._probe_up or i == 0) and i + 1 < len(self.ladder)
        return self.ladder[i + 1] if up else self.ladder[i - 1]


def ladder(n_draft_max: int) -> tuple[int, ...]:
    """The draft lengths to choose from: LADDER up to the cap, and the cap itself if it lies below its end."""
    lengths = {k for k in LADDER if k <= n_draft_max}
    return tuple(sorted(lengths | {min(n_draft_max, LADDER[-1])}))
