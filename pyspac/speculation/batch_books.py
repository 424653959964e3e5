"""What batches are charged: the steps of their sequences in, one entry per batch in the loss ledger out.

A batch is booked against what it would have been without drafts: as many sequences, one token each. Other
tokens in it (a prompt's, or of steps that were not told of) are the same either way. It is complete when its
steps have as many tokens as it is wide; where some are never told of, the next batch's first step ends it.

Accidents are no part of the table's times. Plain batches have some, too: one is charged beside what those
take with theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.ledger import LossLedger
from pyspac.speculation.cost_table import CostTable

# Plain steps that an accident may take and be charged: a lost time slice or a page from a disk, not a machine
# that slept. Where accidents hit only wide passes, 5 lost up to half of the time in replays and 10 a tenth;
# where another program comes and goes draft models gained half a percent less.
MOST_BOOKED: Final = 10.0
PLAIN_WEIGHT: Final = 0.01  # of a plain batch, in what they take in the mean: accidents are one in a hundred


@dataclass(slots=True)
class BatchBooks:
    """Of all sequences of a run."""

    ledger: LossLedger = field(default_factory=LossLedger)
    plain_mean: float = 1.0  # what a plain batch takes, accidents included, by what the table says
    _steps: list[StepRecord] = field(default_factory=list)  # of the batch in progress
    _is_after_draft: bool = False  # whether a sequence of it drafted in the step before

    def add(self, record: StepRecord, table: CostTable, *, was_drafting: bool) -> None:
        """Take in one sequence's step. A plain one is a loss only after a draft."""
        if self._steps and not self._belongs(record):
            self._book(table)
        self._steps.append(record)
        self._is_after_draft |= was_drafting
        if self._n_left() <= 0:
            self._book(table)

    def _belongs(self, record: StepRecord) -> bool:
        first = self._steps[0]
        is_new = all(step.server_slot != record.server_slot for step in self._steps)
        return is_new and record.width == first.width and _own(record) <= self._n_left()

    def _n_left(self) -> int:
        """Tokens of the batch that no step had yet."""
        return self._steps[0].width - sum(_own(step) for step in self._steps)

    def _book(self, table: CostTable) -> None:
        steps, is_after_draft, n_left = self._steps, self._is_after_draft, max(0, self._n_left())
        self._steps, self._is_after_draft = [], False
        n_plain = len(steps) + n_left  # tokens without drafts
        is_plain = all(step.is_plain for step in steps)
        plain = table.step(0, n_plain - 1)
        usual = plain if is_plain else table.batch(steps[0].width, sum(step.n_draft for step in steps))
        if plain is None or usual is None:
            return  # no times are told
        more_us = min(_more_us(steps, table), MOST_BOOKED * plain.us)
        n_steps = (usual.us + more_us) / plain.us
        if is_plain and not is_after_draft:
            self.plain_mean += PLAIN_WEIGHT * (n_steps - self.plain_mean)
            self.ledger.book(1.0, 1.0)
        else:
            gained = (n_left + sum(step.n_emitted for step in steps)) / n_plain
            self.ledger.book(n_steps / max(1.0, self.plain_mean), gained)


def _own(record: StepRecord) -> int:
    """Its tokens in the batch."""
    return record.width - record.n_others


def _more_us(steps: list[StepRecord], table: CostTable) -> float:
    """What the batch took beyond the usual: each of its steps tells of the same accident."""
    beyond = [step.total_us - usual.us for step in steps if (usual := table.usual(step)) is not None]
    return max(beyond, default=0.0)
