"""What a speculation controller sees and says: records of steps in, a draft length out.

One controller per sequence (request, server slot). Each step: `next_n_draft()`, then `observe()` of what
happened. What several sequences share (costs, history, the loss budget) is in `Shared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from pyspac.engine.step import StepRecord
from pyspac.speculation.budget import LossBudget
from pyspac.speculation.cost_table import CostTable

N_DECISIONS_KEPT: Final = 4096
Phase = Literal["baseline", "test", "set", "probe", "choose", "hold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of mind, for `--explain`. utility > 1: speculation pays (cascade.txt, equation 3)."""

    step: int  # of this sequence, from 0: the first step it holds for
    phase: Phase
    n_draft: int
    n_steps: int | None = None  # how long it holds at most; None: until the next one
    utilities: dict[int, float] = field(default_factory=dict)  # by draft length
    why: str = ""


@dataclass(slots=True)
class Shared:
    """What the sequences of one run have in common, and the next ones start from."""

    n_draft_max: int  # the cap
    table: CostTable = field(default_factory=CostTable)
    budget: LossBudget = field(default_factory=LossBudget)
    best_utility: dict[int, float] = field(default_factory=dict)  # recent, by draft length >= 1
    acceptance: float | None = None  # long-run share of first drafted tokens that hold
    plain_us: float = 0.0  # of a mean plain step; 0: not measured
    lag_steps: int = 0  # steps until a new limit takes effect (1 through a server's board)


class Controller(ABC):
    """One sequence's decisions."""

    name: str
    wants_shadow = False  # whether unverified drafts should be compared with what follows

    def __init__(self, shared: Shared) -> None:
        """Start a request; `shared` is kept across requests."""
        assert shared.n_draft_max >= 0
        self.shared = shared
        self.n_steps = 0
        self.decisions: deque[Decision] = deque(maxlen=N_DECISIONS_KEPT)

    @property
    def n_draft_max(self) -> int:
        return self.shared.n_draft_max

    @abstractmethod
    def next_n_draft(self) -> int:
        """The longest draft for the next step, 0 .. n_draft_max. Asking twice changes nothing."""

    def observe(self, record: StepRecord) -> None:
        """Take in what the step did. O(1) per step."""
        self.shared.table.observe(record)
        self._observe(record)
        self.n_steps += 1

    @abstractmethod
    def _observe(self, record: StepRecord) -> None:
        """The policy's own part; the cost table is already renewed."""

    def is_listening(self) -> bool:
        """Whether the next record's `experts_us` is looked at, which takes time to read."""
        return True

    def observe_shadow(self, n_draft: int, n_held: int) -> None:  # noqa: B027  most do not look
        """A draft of `n_draft` tokens was compared with the text: the first `n_held` would have held."""

    def _decide(self, phase: Phase, n_draft: int, **details: object) -> None:
        """Keep a decision that holds from the next step on."""
        self.decisions.append(
            Decision(step=self.n_steps, phase=phase, n_draft=n_draft, **details)  # type: ignore[arg-type]
        )
