"""Step 1: cumulative counts to counts per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspac._native import lib
from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.engine.step import StepRecord
from pyspac.scheduler.activations import ActivationDrain


def make_board(n_layer: int = 2, n_expert: int = 4, n_expert_used: int = 2) -> LocalBoard:
    return LocalBoard(
        BoardGeometry.uniform(n_layer=n_layer, n_expert=n_expert, n_expert_used=n_expert_used, n_slots=4)
    )


def test_drain_reports_the_increase() -> None:
    # Two layers, four experts, top-2. Before the drain is made: [[5, 0, 1, 0], [0, 3, 3, 0]].
    # One step of two tokens: layer 0 picks {0, 2} and {0, 3}, layer 1 picks {1, 2} twice.
    # Increase: [[2, 0, 1, 1], [0, 2, 2, 0]]; four activations per layer / top-2 = two tokens.
    board = make_board()
    board.counts[:] = [[5, 0, 1, 0], [0, 3, 3, 0]]
    drain = ActivationDrain(board)
    board.counts[:] = [[7, 0, 2, 1], [0, 5, 5, 0]]
    activity = drain.drain()
    assert activity.counts.tolist() == [[2, 0, 1, 1], [0, 2, 2, 0]]
    assert activity.n_tokens == 2
    idle = drain.drain()
    assert idle.counts.tolist() == [[0] * 4, [0] * 4]
    assert idle.n_tokens == 0


def test_drain_is_right_across_a_wrap() -> None:
    board = make_board()
    board.counts[0, 0] = 2**32 - 1
    drain = ActivationDrain(board)
    board.counts[0, 0] = 3
    assert drain.drain().counts[0, 0] == 4


def test_what_was_drained_stays() -> None:
    board = make_board()
    drain = ActivationDrain(board)
    board.counts[0, 0] += 1
    first = drain.drain()
    board.counts[0, 0] += 2
    assert drain.drain().counts[0, 0] == 2
    assert first.counts[0, 0] == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), min_size=1, max_size=6))
def test_increases_sum_to_the_total(steps: list[list[int]]) -> None:
    board = make_board(n_layer=1)
    drain = ActivationDrain(board)
    total = np.zeros(4, np.uint32)
    for step in steps:
        board.counts[0] += np.array(step, np.uint32)
        total += drain.drain().counts[0]
    assert np.array_equal(total, board.counts[0])


def test_layer_stats_and_counters_are_differences() -> None:
    board = make_board()
    board.counters["n_hit"] = 10
    drain = ActivationDrain(board)
    board.counters["n_hit"] = 13
    board.layer_stats["host_us"][1] = 250
    activity = drain.drain()
    assert activity.counter("n_hit") == 3
    assert activity.counters["n_miss"].tolist() == [0]
    assert activity.layer_stats["host_us"].tolist() == [0, 250]
    assert activity.layer_stats["layer_us"].tolist() == [0, 0]


def test_records_are_read_once() -> None:
    board = make_board()
    board.record_step(StepRecord(n_draft=9))
    drain = ActivationDrain(board)
    written = [
        StepRecord(step=7, server_slot=3, request=-1, n_draft=4, n_accepted=3, draft_us=100, verify_us=900),
        StepRecord(n_draft=4, n_accepted=1, draft_us=120, verify_us=880, process_us=10, sample_us=5),
    ]
    for record in written:
        board.record_step(record)
    activity = drain.drain()
    assert activity.steps == written
    totals = activity.totals
    assert (totals.n_steps, totals.n_draft, totals.n_accepted, totals.n_lost) == (2, 8, 4, 0)
    assert (totals.draft_us, totals.total_us) == (220, 2015)
    assert drain.drain().steps == []


def test_records_lost_in_the_ring_are_counted() -> None:
    board = make_board()
    drain = ActivationDrain(board)
    for step in range(lib.SPAC_N_RECORDS + 7):
        board.record_step(StepRecord(step=step, n_draft=1))
    activity = drain.drain()
    totals = activity.totals
    n_whole = lib.SPAC_N_RECORDS - 1  # the oldest may be half overwritten
    assert (totals.n_steps, totals.n_lost, totals.n_draft) == (n_whole, 8, n_whole)
    assert [record.step for record in activity.steps] == list(range(8, lib.SPAC_N_RECORDS + 7))


def test_records_that_are_overwritten_while_they_are_read_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    board = make_board()
    drain = ActivationDrain(board)
    n_before, n_meanwhile = lib.SPAC_N_RECORDS - 10, 100
    for step in range(n_before):
        board.record_step(StepRecord(step=step))

    def read(row: Any, from_row: Callable[[Any], StepRecord] = StepRecord.from_row) -> StepRecord:
        for step in range(int(board.n_records[0]), n_before + n_meanwhile):
            board.record_step(StepRecord(step=step))
        return from_row(row)

    monkeypatch.setattr(StepRecord, "from_row", read)
    activity = drain.drain()
    first = n_meanwhile - 10 + 1
    assert [record.step for record in activity.steps] == list(range(first, n_before))
    assert activity.totals.n_lost == first
    assert [record.step for record in drain.drain().steps] == list(range(n_before, n_before + n_meanwhile))


@pytest.mark.parametrize(("n_draft", "n_accepted"), [(0, 1), (3, 4), (-1, 0), (-1, -1), (2, -1)])
def test_a_record_of_no_possible_step_is_lost(n_draft: int, n_accepted: int) -> None:
    board = make_board()
    drain = ActivationDrain(board)
    board.record_step(StepRecord(n_draft=n_draft, n_accepted=n_accepted, verify_us=100))
    board.record_step(StepRecord(step=1, n_draft=2, n_accepted=2))
    activity = drain.drain()
    assert [record.step for record in activity.steps] == [1]
    assert activity.totals.n_lost == 1


@pytest.mark.parametrize("impossible", [{"n_masks": -2}, {"n_matched": -40}])
def test_a_record_with_counts_below_zero_is_lost(impossible: dict[str, int]) -> None:
    """A controller divides by the width, and looks up what a match is worth."""
    board = make_board()
    drain = ActivationDrain(board)
    board.record_step(StepRecord(n_draft=1, verify_us=100, **impossible))
    assert drain.drain().totals.n_lost == 1
