"""pyspac.engine.step: records of steps and their sums. What the C header says is in test_engine_wrapper."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.engine.step import StepRecord, StepTotals

BOARD = LocalBoard(BoardGeometry.uniform(n_layer=1, n_expert=1, n_expert_used=1, n_slots=1))
RECORD = BOARD.records.dtype


def records() -> st.SearchStrategy[StepRecord]:
    def numbers(name: str) -> st.SearchStrategy[int]:
        limits = np.iinfo(RECORD[name])
        return st.integers(limits.min, limits.max)

    return st.builds(StepRecord, **{name: numbers(name) for name in RECORD.names})


@given(records())
def test_a_row_of_the_ring_is_the_record(record: StepRecord) -> None:
    BOARD.record_step(record)
    newest = (int(BOARD.n_records[0]) - 1) % len(BOARD.records)
    assert StepRecord.from_row(BOARD.records[newest]) == record


def test_only_python_knows_the_overhead() -> None:
    names = {f.name for f in fields(StepRecord)}
    assert names - set(RECORD.names) == {"overhead_us"}
    assert names >= set(RECORD.names)


def test_a_step_in_company_by_hand() -> None:
    """Three drafted, two of them accepted; five tokens of other sequences in the batch of nine."""
    step = StepRecord(
        n_draft=3, n_accepted=2, n_tokens=9, draft_us=10, verify_us=70, process_us=2, sample_us=3,
        overhead_us=5,
    )  # fmt: skip
    assert (step.width, step.n_others, step.n_emitted) == (9, 5, 3)
    assert step.total_us == 90


def test_masks_are_nobody_elses_tokens() -> None:
    """Two drafted tokens, and two masks behind each of the three."""
    step = StepRecord(n_draft=2, n_accepted=1, n_tokens=9, n_masks=6)
    assert (step.width, step.n_others, step.n_emitted, step.is_plain) == (9, 0, 2, False)
    assert StepRecord(n_draft=2, n_masks=6).width == 9
    assert not StepRecord(n_tokens=3, n_masks=2).is_plain  # nothing verified: it drafts
    assert StepRecord(n_tokens=1).is_plain


def test_a_width_that_was_not_told_is_the_drafts() -> None:
    assert (StepRecord(n_draft=4).width, StepRecord(n_draft=4).n_others) == (5, 0)


def test_totals_by_hand() -> None:
    totals = StepTotals().add([StepRecord(n_draft=4, n_accepted=2, verify_us=50)], n_lost=1)
    totals.add([StepRecord(n_draft=2, draft_us=5, process_us=1, sample_us=4), StepRecord()], n_lost=2)
    assert (totals.n_steps, totals.n_lost, totals.n_draft, totals.n_accepted) == (3, 3, 6, 2)
    assert (totals.n_tokens, totals.total_us) == (5, 60)
    assert totals.acceptance_rate == pytest.approx(1 / 3)
    assert totals.acceptance_length == pytest.approx(5 / 3)


def test_no_steps_have_no_rates() -> None:
    assert (StepTotals().acceptance_rate, StepTotals().acceptance_length) == (None, None)
