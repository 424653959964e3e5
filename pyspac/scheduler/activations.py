"""Step 1: the engine's cumulative counters in, what happened since the last step out (a StepRecord).

The engine only ever adds; the scheduler subtracts what it saw before. Unsigned subtraction is right across a
wrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import COUNTER_FIELDS, LAYER_STATS_FIELDS, N_RECORDS, BoardView

_COUNTER = {name: i for i, name in enumerate(COUNTER_FIELDS)}
LAYER_STAT = {name: i for i, name in enumerate(LAYER_STATS_FIELDS)}


@dataclass(slots=True)
class StepRecord:
    """What happened since the previous drain. The next drain overwrites the arrays."""

    counts: NDArray[np.uint32]  # [n_layer, n_expert] activations
    layer_stats: NDArray[np.uint64]  # [n_layer, 8] differences, columns as LAYER_STATS_FIELDS
    counters: NDArray[np.uint64]  # [17] differences, columns as COUNTER_FIELDS
    n_tokens: int = 0  # tokens that were routed: activations of the busiest layer / n_expert_used
    n_records: int = 0  # step records read; the sums below are over them
    n_draft: int = 0
    n_accepted: int = 0
    draft_us: int = 0
    verify_us: int = 0
    process_us: int = 0
    sample_us: int = 0
    n_records_lost: int = 0  # overwritten in the ring before they were read

    def counter(self, name: str) -> int:
        """Return the increase of one of spac_counters' fields."""
        return int(self.counters[_COUNTER[name]])

    @property
    def step_us(self) -> int:
        """Return the time of the recorded steps: draft, verify, process and sample."""
        return self.draft_us + self.verify_us + self.process_us + self.sample_us


class _Difference:
    """One cumulative array: `drain` reads it once and leaves the increase in `delta`."""

    def __init__(self, source: NDArray[Any]) -> None:
        self._before = source.copy()
        self.delta = np.zeros_like(self._before)

    def drain(self, source: NDArray[Any]) -> None:
        np.subtract(source, self._before, out=self.delta)
        np.add(self._before, self.delta, out=self._before)  # not a second read: the engine writes meanwhile


class ActivationDrain:
    """Turns a board's cumulative arrays into one StepRecord per call, in place. O(n_layer * n_expert)."""

    def __init__(self, board: BoardView) -> None:
        """Start at the board's present counts: the first drain reports what comes after."""
        self.board = board
        self._counts = _Difference(board.counts)
        self._layer_stats = _Difference(board.layer_stats.view(np.uint64))
        self._counters = _Difference(board.counters.view(np.uint64))
        self._n_records = int(board.n_records[0])
        self._rows = np.zeros(board.n_layer, np.uint32)  # [n_layer] activations
        layer_stats = self._layer_stats.delta.reshape(-1, len(LAYER_STATS_FIELDS))
        self.record = StepRecord(self._counts.delta, layer_stats, self._counters.delta)

    def drain(self) -> StepRecord:
        """Return what happened since the last call; the same object every time."""
        board = self.board
        self._counts.drain(board.counts)
        self._layer_stats.drain(board.layer_stats.view(np.uint64))
        self._counters.drain(board.counters.view(np.uint64))
        np.add.reduce(self._counts.delta, axis=1, out=self._rows)
        self.record.n_tokens = -(-max(self._rows.tolist()) // board.n_expert_used)
        self._drain_records()
        return self.record

    def _drain_records(self) -> None:
        """Sum the step records written since the last call; what the ring lost is counted."""
        board, record = self.board, self.record
        n_ever = int(board.n_records[0])
        n_new = min(n_ever - self._n_records, N_RECORDS)
        record.n_records_lost = n_ever - self._n_records - n_new
        record.n_records = n_new
        record.n_draft = record.n_accepted = 0
        record.draft_us = record.verify_us = record.process_us = record.sample_us = 0
        for index in range(n_ever - n_new, n_ever):
            entry = board.records[index % N_RECORDS]
            record.n_draft += int(entry["n_draft"])
            record.n_accepted += int(entry["n_accepted"])
            record.draft_us += int(entry["draft_us"])
            record.verify_us += int(entry["verify_us"])
            record.process_us += int(entry["process_us"])
            record.sample_us += int(entry["sample_us"])
        self._n_records = n_ever
