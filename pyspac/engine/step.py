"""One decoding step: what a step did in (a `StepRecord`), sums over steps out (`StepTotals`).

A record has the fields of spac.h's spac_step_record, and what only Python knows of the step. A server
or `Llama` makes it, the board's ring carries it to the scheduler, and controllers and reports read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self


@dataclass(slots=True, kw_only=True)  # one for each step: frozen ones take twice as long to make
class StepRecord:
    """One draft + verify cycle of one sequence. Times in microseconds; whole numbers on the board."""

    step: int = 0  # of the sequence, from 0
    server_slot: int = 0
    request: int = 0  # the server's task; -1: the writer does not know
    n_draft: int = 0  # tokens drafted and verified; may be fewer than asked for
    n_accepted: int = 0
    n_tokens: int = 0  # width of the verified batch, all sequences in it; 0: 1 + n_draft
    draft_us: float = 0
    verify_us: float = 0
    process_us: float = 0  # taking rejected tokens back, handing out
    sample_us: float = 0  # verification's decision
    n_masks: int = 0  # tokens of the batch that only draft the next ones
    n_matched: int = 0  # of the tokens before its drafts, that stood together before, too; 0: none
    # of a step before whose draft was not made: the match, negative if its first token did not come; 0: none
    n_passed_over: int = 0
    # this is not on the board
    overhead_us: float = 0  # what else the step took: scheduling, the loop itself

    @property
    def width(self) -> int:
        """Tokens of the verified batch."""
        return max(self.n_tokens, 1 + self.n_draft + self.n_masks)

    @property
    def is_plain(self) -> bool:
        """Whether it was plain decoding: no drafts verified, and none made in its pass."""
        return not (self.n_draft or self.n_masks)

    @property
    def is_possible(self) -> bool:
        """Whether a step can have done that; other programs write records, too."""
        return 0 <= self.n_accepted <= self.n_draft and self.n_masks >= 0 and self.n_matched >= 0

    @property
    def n_others(self) -> int:
        """Tokens of other sequences in the same batch."""
        return self.width - 1 - self.n_draft - self.n_masks

    @property
    def n_emitted(self) -> int:
        """Accepted drafts and the target's own token."""
        return 1 + self.n_accepted

    @property
    def total_us(self) -> float:
        """Time of the whole step."""
        return self.draft_us + self.verify_us + self.process_us + self.sample_us + self.overhead_us

    @classmethod
    def from_row(cls, row: Any) -> Self:
        """Read a row of the board's ring, spac_step_record."""
        return cls(**dict(zip(row.dtype.names, row.item(), strict=True)))


@dataclass(slots=True)
class StepTotals:
    """Sums over step records; times in microseconds."""

    n_steps: int = 0
    n_lost: int = 0  # records overwritten in the ring before they were read
    n_draft: int = 0
    n_accepted: int = 0
    draft_us: float = 0
    verify_us: float = 0
    process_us: float = 0
    sample_us: float = 0

    def add(self, steps: Iterable[StepRecord], n_lost: int = 0) -> Self:
        """Take in some steps, and how many were lost besides; returns itself."""
        self.n_lost += n_lost
        for step in steps:
            self.n_steps += 1
            self.n_draft += step.n_draft
            self.n_accepted += step.n_accepted
            self.draft_us += step.draft_us
            self.verify_us += step.verify_us
            self.process_us += step.process_us
            self.sample_us += step.sample_us
        return self

    @property
    def n_tokens(self) -> int:
        """Generated: each step yields the accepted drafts and one more."""
        return self.n_steps + self.n_accepted

    @property
    def total_us(self) -> float:
        """Time of the steps, as the board carries it: without overhead."""
        return self.draft_us + self.verify_us + self.process_us + self.sample_us

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None if nothing was drafted."""
        return self.n_accepted / self.n_draft if self.n_draft else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step; None without a step."""
        return self.n_tokens / self.n_steps if self.n_steps else None

    def to_dict(self) -> dict[str, float | int | None]:
        """The figures of speculation under their names in `--json`."""
        return {
            "n_steps": self.n_steps,
            "n_drafted": self.n_draft,
            "n_accepted": self.n_accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
        }
