"""The reader of the routing log: each row once, none that is being overwritten."""

from __future__ import annotations

import numpy as np

from pyspac._native import lib
from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.scheduler.routing_log import RoutingLog


def make_board() -> LocalBoard:
    return LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=300, n_expert_used=2, n_slots=4))


def write(board: LocalBoard, first: int, n: int) -> None:
    """Tokens `first` and so on; each with its number as all of its experts."""
    tokens = np.arange(first, first + n, dtype=np.int32)
    board.record_routing(tokens, np.broadcast_to(tokens[:, None, None], (n, 2, 2)).astype(np.uint16))


def test_each_row_is_read_once() -> None:
    board = make_board()
    write(board, 0, 3)
    log = RoutingLog(board)
    assert len(log.read()[0]) == 0  # what was there before
    write(board, 3, 2)
    tokens, experts = log.read()
    assert tokens.tolist() == [3, 4]
    assert experts.shape == (2, 2, 2)
    assert (experts[1] == 4).all()
    write(board, 5, 1)
    assert tokens.tolist() == [3, 4]  # a copy
    assert log.read()[0].tolist() == [5]
    assert (len(log.read()[0]), log.n_lost) == (0, 0)


def test_rows_that_were_overwritten_are_lost_and_counted() -> None:
    board = make_board()
    log = RoutingLog(board)
    for first in range(0, lib.SPAC_N_ROUTED + 100, 50):
        write(board, first, 50)
    n_written = int(board.n_routed[0])
    tokens, experts = log.read()
    assert tokens.tolist() == list(range(n_written - lib.SPAC_N_ROUTED, n_written))
    assert experts[:, 0, 0].tolist() == tokens.tolist()
    assert log.n_lost == n_written - lib.SPAC_N_ROUTED


def test_rows_that_are_being_overwritten_are_lost() -> None:
    board = make_board()
    log = RoutingLog(board)
    write(board, 0, lib.SPAC_N_ROUTED)
    board.n_routed[1] += np.uint64(20)  # a forward of 20 tokens has begun
    assert log.read()[0].tolist() == list(range(20, lib.SPAC_N_ROUTED))
    assert log.n_lost == 20
