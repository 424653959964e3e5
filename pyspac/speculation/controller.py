"""What a speculation controller sees and says: records of steps in, a draft length out.

One controller per sequence (request, server slot). Each step: `next_n_draft()`, then `observe()` of what
happened: at once, or of several steps together (a server's board). What several sequences share is in
`Shared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast

from pyspac.engine.step import StepRecord
from pyspac.speculation.cost_table import CostTable

N_DECISIONS_KEPT: Final = 4096
Phase = Literal["baseline", "test", "set", "probe", "choose", "hold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of mind, for `--explain`. utility > 1: speculation pays (Cascade, equation 3)."""

    step: int  # of this sequence, from 0: the first step it holds for
    phase: Phase
    n_draft: int
    n_steps: int | None = None  # how long it holds at most; None: until the next one for its place
    utilities: dict[int, float] = field(default_factory=dict)  # by draft length
    why: str = ""


Memory = TypeVar("Memory")


@dataclass(slots=True)
class Shared:
    """What the sequences of one run have in common, and the next ones start from."""

    n_draft_max: int  # the cap
    lag_steps: int = 0  # steps until a new limit takes effect (1 through a server's board)
    table: CostTable = field(default_factory=CostTable)
    _memories: dict[type, Any] = field(default_factory=dict)

    def memory(self, kind: type[Memory]) -> Memory:
        """What one class of controllers keeps for its next requests: its own object, made at first."""
        if kind not in self._memories:
            self._memories[kind] = kind()
        return cast(Memory, self._memories[kind])


class Controller(ABC):
    """One sequence's decisions."""

    name: str

    def __init__(self, shared: Shared) -> None:
        """Start a request; `shared` is kept across requests."""
        assert shared.n_draft_max >= 0
        self.shared = shared
        self.n_steps = 0
        self.n_missed = 0  # tokens since the last draft
        self.last: StepRecord | None = None  # its last step, but for the one that is taken in
        self.decisions: deque[Decision] = deque(maxlen=N_DECISIONS_KEPT)

    @property
    def n_draft_max(self) -> int:
        return self.shared.n_draft_max

    @property
    def was_drafting(self) -> bool:
        """Whether the step before drafted."""
        return self.last is not None and not self.last.is_plain

    @abstractmethod
    def next_n_draft(self) -> int:
        """The longest draft for the next step, 0 .. n_draft_max. Asking twice changes nothing."""

    def observe(self, record: StepRecord) -> None:
        """Take in what the step did. O(1)."""
        self.shared.table.observe(record, self.last, self.n_missed)
        self.n_missed = self.n_missed + 1 if record.is_plain else 0
        self.n_steps += 1
        self._observe(record)
        self.last = record

    @abstractmethod
    def _observe(self, record: StepRecord) -> None:
        """The policy's own part; the cost table is already renewed, and the step counted."""

    def _decide(self, phase: Phase, n_draft: int, **details: object) -> None:
        """Keep a decision that holds from the next step on."""
        self.decisions.append(
            Decision(step=self.n_steps, phase=phase, n_draft=n_draft, **details)  # type: ignore[arg-type]
        )
