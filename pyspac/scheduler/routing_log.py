"""The engine's routing log: which token used which experts, read once per step by who learns from it."""

from __future__ import annotations

import numpy as np

from pyspac.engine.board import Board
from pyspac.scheduler.predict.predictor import Routed, Tokens


class RoutingLog:
    """One reader of the ring; each has its own place in it."""

    def __init__(self, board: Board) -> None:
        """Ask for the log: the first read returns what comes after."""
        self.board = board
        self.n_lost = 0  # rows that were overwritten before they were read
        self._n_read = int(board.n_routed[0])
        board.looks_ahead[0] = 1

    def read(self) -> tuple[Tokens, Routed]:
        """Return copies of the rows written since the last call, in their order: [n] and [n, ...].

        The engine writes on meanwhile: what it began to overwrite while the rows were copied is lost.
        """
        before, self._n_read = self._n_read, int(self.board.n_routed[0])
        n_kept = len(self.board.routed_tokens)
        first = max(before, self._n_read - n_kept)
        rows = np.arange(first, self._n_read) % n_kept
        tokens, experts = self.board.routed_tokens[rows], self.board.routed_experts[rows]
        first_whole = int(self.board.n_routed[1]) - n_kept
        n_torn = min(max(0, first_whole - first), len(rows))
        self.n_lost += first - before + n_torn
        return tokens[n_torn:], experts[n_torn:]
