"""The predictor `token` where no device is and experts are on disk: upcoming tokens in, reads ahead out.

There is nothing to place: the loads of a decision are what the engine reads into memory before a layer asks
for it. In one process no scheduler runs beside it; beside a server it works in the scheduler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from pyspac.engine.ahead import share
from pyspac.engine.board import Board
from pyspac.scheduler.predict.predictor import Predictor
from pyspac.scheduler.predict.token import TokenPredictor
from pyspac.scheduler.routing_log import RoutingLog


class ReadAhead:
    """One predictor at work on the board of an engine whose experts are on disk."""

    def __init__(self, board: Board, predictor: Predictor) -> None:
        """Expect nothing yet."""
        self.predictor = predictor
        self._board = board
        self._log = RoutingLog(board)
        self._is_split = np.asarray(board.expert_bytes) > 0  # [n_layer]
        self._us = 0.0
        self._n_looks = 0
        self._n_queued = 0

    def learn(self) -> None:
        """Take in what the tokens since the last call used."""
        start = perf_counter_ns()
        tokens, experts = self._log.read()
        if len(tokens):
            self.predictor.learn(tokens, experts)
        self._us += (perf_counter_ns() - start) / 1e3

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """Ask for what the next forward's tokens will use, as far as it is known, layer by layer."""
        start = perf_counter_ns()
        expected = self.predictor.predict(np.asarray(tokens, np.int32)) * self._is_split[:, None]
        layers, experts = np.nonzero(expected)
        order = np.lexsort((-expected[layers, experts].astype(np.int64), layers))  # the last key comes first
        load = (layers * self._board.n_expert + experts)[order]
        self._n_queued += int(np.count_nonzero(self._board.in_memory.reshape(-1)[load] == 0))
        with self._board.decision():
            self._board.load[: len(load)] = load
            self._board.n_load[0] = len(load)
        self._n_looks += 1
        self._us += (perf_counter_ns() - start) / 1e3

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for reports; shares are None where there is nothing to divide by."""
        score = self.predictor.score
        return {
            "name": self.predictor.name,
            "recall": score.recall,
            "precision": score.precision,
            "known": score.known,
            "n_tokens": score.n_tokens,
            "us": self._us,
            "us_per_step": share(self._us, self._n_looks),
            "n_bytes": self.predictor.n_bytes,
            "n_queued": self._n_queued,
            "n_rows_lost": self._log.n_lost,
        }


def make_read_ahead(board: Board, names: Sequence[str]) -> ReadAhead | None:
    """Return the predictor of a configuration, if it is one that runs here and experts are on disk."""
    if TokenPredictor.name not in names or not board.tier["n_slots"][0] or board.group_slots.any():
        return None
    return ReadAhead(board, TokenPredictor(board.n_layer, board.n_expert, board.n_expert_used))
