"""Step 1: the engine's counters and step records in, what happened since the last step out (an `Activity`).

The engine only ever adds; the scheduler subtracts what it saw before. Unsigned subtraction is right across a
wrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board
from pyspac.engine.step import StepRecord, StepTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What happened on a board between two drains."""

    counts: NDArray[np.uint32]  # [n_layer, n_expert] activations
    n_tokens: int  # that were routed: activations of the busiest layer / n_expert_used
    prompt_counts: NDArray[np.uint32]  # [n_layer, n_expert] activations of prompts
    prompt_tokens: NDArray[np.int64]  # [n_layer] that were routed there, of prompts
    layer_stats: NDArray[Any]  # [n_layer] spac_layer_stats
    counters: NDArray[Any]  # [1] spac_counters
    steps: list[StepRecord]  # in their order
    totals: StepTotals  # of `steps`
    device_copies: NDArray[np.uint64] | None = None  # [2, n_device] bytes, microseconds; None: there is one

    def counter(self, name: str) -> int:
        """Return the increase of one of spac_counters' fields."""
        return int(self.counters[name][0])

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Return of each device the bytes that were copied to it, and the microseconds that took."""
        if self.device_copies is not None:
            return list(zip(*self.device_copies.tolist(), strict=True))
        return [(self.counter("loaded_bytes"), self.counter("load_us"))]


class _Difference:
    """One cumulative array of one type of numbers; `drain` returns its increase since the last call."""

    def __init__(self, source: NDArray[Any]) -> None:
        self._before = source.copy()

    def drain(self, source: NDArray[Any]) -> NDArray[Any]:
        before, self._before = self._before, source.copy()  # one look at it: the engine writes meanwhile
        return np.asarray(self._before - before)


def _per_layer(counts: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Sum [n_layer, n_expert] over experts, in 32 bits: numpy's own 64 take three times as long."""
    return np.asarray(counts.sum(axis=1, dtype=np.uint32))


def _read_copies(board: Board) -> NDArray[np.uint64]:
    return np.array([board.devices["loaded_bytes"], board.devices["load_us"]])


class ActivationDrain:
    """The one reader of a board's counters and ring of records. O(n_layer * n_expert)."""

    def __init__(self, board: Board) -> None:
        """Start at the board's present state: the first drain reports what comes after."""
        self.board = board
        self._counts = _Difference(board.counts)
        self._prompt_counts = _Difference(board.prompt_counts)
        self._layer_stats = _Difference(board.layer_stats.view(np.uint64))
        self._counters = _Difference(board.counters.view(np.uint64))
        self._copies = _Difference(_read_copies(board)) if board.n_device > 1 else None
        self._n_records = int(board.n_records[0])

    def drain(self) -> Activity:
        """Return what happened since the last call."""
        board = self.board
        steps, n_lost = self._read_steps()  # first: a step's times are written before its record
        counts = self._counts.drain(board.counts)
        prompt_counts = self._prompt_counts.drain(board.prompt_counts)
        return Activity(
            counts=counts,
            n_tokens=-(-int(_per_layer(counts).max()) // board.n_expert_used),
            prompt_counts=prompt_counts,
            prompt_tokens=-(-_per_layer(prompt_counts).astype(np.int64) // board.n_expert_used),
            layer_stats=self._layer_stats.drain(board.layer_stats.view(np.uint64)).view(
                board.layer_stats.dtype
            ),
            counters=self._counters.drain(board.counters.view(np.uint64)).view(board.counters.dtype),
            steps=steps,
            totals=StepTotals().add(steps, n_lost),
            device_copies=None if self._copies is None else self._copies.drain(_read_copies(board)),
        )

    def _read_steps(self) -> tuple[list[StepRecord], int]:
        """Return the records written since the last call, and how many are lost.

        The engine writes on meanwhile, so the oldest are not whole: n_accepted may be of another record than
        n_draft. What no step can have done is lost as well.
        """
        before, self._n_records = self._n_records, int(self.board.n_records[0])
        records = self.board.records
        first = max(before, self._n_records - len(records))
        steps = [StepRecord.from_row(records[i % len(records)]) for i in range(first, self._n_records)]
        first_whole = int(self.board.n_records[0]) - len(records) + 1  # the one before is being overwritten
        steps = [step for step in steps[max(0, first_whole - first) :] if step.is_possible]
        return steps, self._n_records - before - len(steps)
