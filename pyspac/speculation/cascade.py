"""The paper's controller: test a few draft lengths for a few steps each, then keep the best for a while.

Cascade, section 5: test-and-set (5.3), speculation off where utility is below 1 (5.4), back-off of the
tests (5.5), hill climbing over draft lengths (5.6). Each of the last three can be switched off by name
(figure 18); without any of them the draft length is K_start for good.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError
from pyspac.speculation.controller import Controller, Phase, Shared
from pyspac.speculation.utility import UtilityAnalyzer

# what can be taken away, as in figure 18
OPTIMISATIONS: Final = {
    "disable": "never switch speculation off",
    "backoff": "test at the same distance, however often speculation fails",
    "climb": "test K_start only",
}
HISTORY_GAIN: Final = 0.5  # of K_start's memory, per window


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeConfig:
    """Sections 5.3 and 6. All lengths are in steps."""

    n_trial_steps: int = 4  # t
    n_trials: int = 4  # M
    n_set_steps: int = 16  # S
    n_set_steps_max: int = 256  # cap of the doubled S; ours
    n_baseline_steps: int = 4
    baseline_age_max: int = 100  # steps until the plain step is measured again
    k_start: int = 3
    convergence: float = 0.1
    without: frozenset[str] = frozenset()  # of OPTIMISATIONS

    def __post_init__(self) -> None:
        """ConfigError names an unknown optimisation."""
        if unknown := sorted(self.without - OPTIMISATIONS.keys()):
            raise ConfigError("without", ", ".join(unknown), ", ".join(OPTIMISATIONS))

    def has(self, optimisation: str) -> bool:
        return optimisation not in self.without


class Trial(NamedTuple):
    """One draft length, tested."""

    n_draft: int
    utility: float


class NextTrial(NamedTuple):
    """Where the climb goes; n_draft None: the test ends, and why."""

    n_draft: int | None
    why: str


def next_trial(trials: list[Trial], n_draft_max: int, config: CascadeConfig) -> NextTrial:
    """One step of the hill climb (section 5.6, figure 12), or one of its early exits."""
    k, utility = trials[-1]
    if not config.has("climb"):
        return NextTrial(None, "no climbing")
    if len(trials) >= config.n_trials:
        return NextTrial(None, f"{config.n_trials} trials")
    if k == 1 and utility < 1.0:
        return NextTrial(None, "utility below 1 at K = 1")
    if len(trials) == 1:
        up = utility >= 1.0 and k < n_draft_max
        return _towards(trials, 1 if up else -1, n_draft_max)
    k_before, before = trials[-2]
    if abs(utility - before) <= config.convergence * before:
        return NextTrial(None, f"converged within {config.convergence:.0%}")
    if len(trials) > 2 and utility < before < trials[-3].utility:
        return NextTrial(None, "utility fell twice")
    direction = 1 if k > k_before else -1
    return _towards(trials, direction if utility > before else -direction, n_draft_max)


def _towards(trials: list[Trial], direction: int, n_draft_max: int) -> NextTrial:
    """The nearest length in that direction which was not tried yet."""
    tried = {trial.n_draft for trial in trials}
    k = trials[-1].n_draft + direction
    while k in tried:
        k += direction
    if k < 1:
        return NextTrial(None, "K reached 0")
    if k > n_draft_max:
        return NextTrial(None, "K reached the cap")
    return NextTrial(k, "up" if direction > 0 else "down")


@dataclass(slots=True)
class CascadeMemory:
    """What all requests of a run share."""

    best_utility: dict[int, float] = field(default_factory=dict)  # recent, by draft length >= 1


class Cascade(Controller):
    """The speculation manager of one request."""

    name = "cascade"

    def __init__(self, shared: Shared, config: CascadeConfig | None = None) -> None:
        """Begin with the baseline; costs of an earlier request are not trusted, as in the paper."""
        super().__init__(shared)
        self.config = config or CascadeConfig()
        self.memory = shared.memory(CascadeMemory)
        self.analyzer = UtilityAnalyzer()
        self.trials: list[Trial] = []
        self._n_set_steps = self.config.n_set_steps
        self._baseline_age = 0
        self._was_off = False  # the last set phase had K = 0
        self._n_unsettled = 0  # records that still belong to the draft length before
        if self.n_draft_max == 0:
            self._enter("set", 0, None, "the cap is 0")
        else:
            self._enter("baseline", 0, self.config.n_baseline_steps, "plain steps to compare with")

    def next_n_draft(self) -> int:
        return self._n_draft

    def _enter(self, phase: Phase, n_draft: int, n_steps: int | None, why: str) -> None:
        self.phase = phase
        self._n_left = n_steps
        self._n_unsettled = self.shared.lag_steps
        self._n_draft = n_draft
        self.analyzer.start_window()
        self._decide(phase, n_draft, n_steps=n_steps, why=why, utilities=dict(self.trials))

    def _observe(self, record: StepRecord) -> None:
        self._baseline_age += 1
        if self._n_unsettled:
            self._n_unsettled -= 1
            return
        self.analyzer.observe(record)
        if self._n_left is not None:
            self._n_left -= 1
            if self._n_left == 0:
                self._end_phase()

    def _end_phase(self) -> None:
        if self.phase == "baseline":
            self._renew_baseline()
            self._start_test()
        elif self.phase == "test":
            self._end_trial()
        else:
            self._end_set()

    def _renew_baseline(self) -> None:
        self.analyzer.set_base(self.config.n_baseline_steps)
        self._baseline_age = 0

    def _start_test(self) -> None:
        self.trials = []
        k, why = self._k_start()
        self._enter("test", k, self.config.n_trial_steps, why)

    def _k_start(self) -> tuple[int, str]:
        default = min(self.config.k_start, self.n_draft_max)
        if not self.config.has("climb"):
            return default, "K_start"
        if self._was_off:
            return 1, "carefully, after K = 0"
        history = self.memory.best_utility
        if history:
            return max(history, key=lambda k: history[k]), "the best of recent history"
        return default, "K_start"

    def _end_trial(self) -> None:
        utility = self.analyzer.utility()
        self.trials.append(Trial(self._n_draft, utility))
        self._remember(self._n_draft, utility)
        k, why = next_trial(self.trials, self.n_draft_max, self.config)
        if k is None:
            self._start_set(why)
        else:
            self._enter("test", k, self.config.n_trial_steps, why)

    def _start_set(self, why: str) -> None:
        best = max(self.trials, key=lambda trial: trial.utility)
        if best.utility < 1.0 and self.config.has("disable"):
            n_steps = self._n_set_steps
            if self.config.has("backoff"):
                self._n_set_steps = min(2 * n_steps, self.config.n_set_steps_max)
            self._was_off = True
            self._enter("set", 0, n_steps, f"{why}; no utility reaches 1")
        else:
            self._n_set_steps = self.config.n_set_steps
            self._was_off = False
            self._enter("set", best.n_draft, self.config.n_set_steps, why)

    def _end_set(self) -> None:
        if self._n_draft == 0:
            self._renew_baseline()
        else:
            self._remember(self._n_draft, self.analyzer.utility())
        if self._baseline_age >= self.config.baseline_age_max:
            self._enter("baseline", 0, self.config.n_baseline_steps, "the plain step again")
        else:
            self._start_test()

    def _remember(self, n_draft: int, utility: float) -> None:
        """The history that K_start comes from, over all requests."""
        old = self.memory.best_utility.get(n_draft, utility)
        self.memory.best_utility[n_draft] = old + HISTORY_GAIN * (utility - old)
