"""The utility of speculation, and equation 1 of gamma-tolerance: the formulas, and the analyzer of a window.

Utility U = ETR / cost: tokens per step over (time per step / time of a plain step); speculation pays if and
only if U > 1, and the time per token is the plain one over U (Cascade, section 4, theorem 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from pyspac.engine.step import StepRecord


def expected_tokens(n_draft: int, acceptance: float) -> float:
    """lambda: tokens per step if each drafted token holds with the same chance; 1 + a + ... + a^n_draft."""
    return sum(acceptance**i for i in range(n_draft + 1))


def speedup(n_draft: int, acceptance: float, tolerance: float, delta: float) -> float:
    """S of gamma-tolerance, equation 1; `tolerance` is tau(n_draft + 1) = T(1) / T(n_draft + 1)."""
    return expected_tokens(n_draft, acceptance) * tolerance / (1.0 + n_draft * delta * tolerance)


def break_even(n_draft: int, tolerance: float, delta: float) -> float | None:
    """The acceptance from which S >= 1; None: none does. By bisection, to 1e-6."""
    if n_draft == 0 or speedup(n_draft, 1.0, tolerance, delta) < 1.0:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        if speedup(n_draft, middle, tolerance, delta) >= 1.0:
            high = middle
        else:
            low = middle
    return high


@dataclass(slots=True)
class Window:
    """Some steps at one draft length."""

    n_steps: int = 0
    n_emitted: int = 0
    total_us: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Take in one step."""
        self.n_steps += 1
        self.n_emitted += record.n_emitted
        self.total_us += record.total_us

    def utility(self, base_us: float) -> float:
        """ETR / cost; 0 if nothing was measured."""
        if self.total_us <= 0.0:
            return 0.0
        return self.n_emitted * base_us / self.total_us


@dataclass(slots=True)
class UtilityAnalyzer:
    """Tracks the plain step's time and the utility of the current window (Cascade, figure 9)."""

    base_us: float = 0.0  # of a plain step; 0: not measured
    window: Window = field(default_factory=Window)
    _plain: list[float] = field(default_factory=list)

    def start_window(self) -> None:
        """Forget the current window."""
        self.window = Window()
        self._plain = []

    def observe(self, record: StepRecord) -> None:
        """Take in one step of the current window."""
        self.window.add(record)
        if record.is_plain:
            self._plain.append(record.total_us)

    def set_base(self, n_last: int) -> None:
        """Take the median of the window's last `n_last` plain steps as the baseline."""
        if self._plain:
            self.base_us = median(self._plain[-n_last:])

    def utility(self) -> float:
        """Of the current window."""
        return self.window.utility(self.base_us)
