"""What a speculation controller sees and says: records of steps in, a draft length out.

One controller per sequence (request, server slot). Each step: `next_n_draft()`, then `observe()` of what
happened; plain steps may be told of later, some together (`n_rest`). What several sequences share is in
`Shared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
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
    wants_shadow = False  # whether unverified drafts should be compared with what follows

    def __init__(self, shared: Shared) -> None:
        """Start a request; `shared` is kept across requests."""
        assert shared.n_draft_max >= 0
        self.shared = shared
        self.n_steps = 0
        self.n_missed = 0  # tokens since the last draft
        self.n_rest = 0  # plain steps behind plain steps that may be told of together; 0: each at once
        self.n_untold = 0  # steps that are done, and that it was not told of yet
        self.last: StepRecord | None = None  # its last step, but for the one that is looked at
        self.decisions: deque[Decision] = deque(maxlen=N_DECISIONS_KEPT)
        self.compare_shadow: Callable[[], None] = _nothing  # have `observe_shadow` told what there is to tell

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
        """Take in what the step did. O(1) per step. A controller may gather steps until it has to decide."""
        self._learn_step(record)

    def learn_gathered(self) -> None:  # noqa: B027  most gather nothing
        """Take in what was gathered: the request is over."""

    def _learn_step(self, record: StepRecord) -> None:
        self.shared.table.observe(record, self.last, self.n_missed)
        self.n_missed = self.n_missed + 1 if record.is_plain else 0
        self.n_steps += 1
        self._observe(record)
        self.last = record

    @abstractmethod
    def _observe(self, record: StepRecord) -> None:
        """The policy's own part; the cost table is already renewed, and the step counted."""

    def watch_shadow(self, compare: Callable[[], None]) -> None:
        """Unverified drafts are compared with the text; `compare` has `observe_shadow` told of them."""
        self.compare_shadow = compare

    def observe_shadow(self, n_draft: int, n_held: int) -> None:  # noqa: B027  most do not look
        """A draft of `n_draft` tokens was compared with the text: the first `n_held` would have held."""

    def _decide(self, phase: Phase, n_draft: int, step: int | None = None, **details: object) -> None:
        """Keep a decision that holds from this step on; None: from the one after those learned."""
        first = self.n_steps if step is None else step
        self.decisions.append(
            Decision(step=first, phase=phase, n_draft=n_draft, **details)  # type: ignore[arg-type]
        )


def _nothing() -> None:
    """Nothing drafts in the shadow."""
