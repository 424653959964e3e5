"""Sums over the step records of a board, kept while they pass through its ring."""

from __future__ import annotations

from dataclasses import dataclass

from pyspac.scheduler.activations import StepRecord


@dataclass(slots=True)
class StepTotals:
    """Since the scheduler attached; times in microseconds."""

    n_steps: int = 0
    n_lost: int = 0  # overwritten in the ring before they were read
    n_draft: int = 0
    n_accepted: int = 0
    draft_us: int = 0
    verify_us: int = 0
    process_us: int = 0

    @property
    def n_tokens(self) -> int:
        """Generated: each step yields the accepted drafts and one more."""
        return self.n_steps + self.n_accepted

    def add(self, record: StepRecord) -> None:
        """Take in what one drain found."""
        self.n_steps += record.n_records
        self.n_lost += record.n_records_lost
        for name in ("n_draft", "n_accepted", "draft_us", "verify_us", "process_us"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
