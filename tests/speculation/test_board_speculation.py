"""pyspac.speculation.board_speculation: records in, limits out, one step late."""

from __future__ import annotations

import pytest

from pyspac.board import N_RECORDS, BoardGeometry, LocalBoard
from pyspac.speculation.board_speculation import BoardSpeculation
from pyspac.speculation.controller import Controller, Shared, StepOutcome
from pyspac.speculation.manager import CONTROLLERS

COSTS = [1000 * x for x in (1, 1.6, 2.1, 2.6, 3.0, 3.3, 3.6, 3.9, 4.2)]


class Server:
    """Plays the server: drafts up to the limit it saw one step ago."""

    def __init__(self, board: LocalBoard, slot: int, n_hold: int) -> None:
        self.board, self.slot, self.n_hold = board, slot, n_hold
        self.limit = int(board.n_draft_max[slot])
        self.n_tokens = 0
        self.total_us = 0.0

    def step(self) -> int:
        n_draft, self.limit = self.limit, int(self.board.n_draft_max[self.slot])
        n_accepted = min(n_draft, self.n_hold)
        us = COSTS[n_draft]
        self.board.record_step(
            server_slot=self.slot, n_draft=n_draft, n_accepted=n_accepted, n_tokens=1 + n_draft,
            verify_us=int(us), process_us=20,
        )  # fmt: skip
        self.n_tokens += 1 + n_accepted
        self.total_us += us
        return n_draft


def new_board() -> LocalBoard:
    return LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=8, n_expert_used=2, n_slots=4))


@pytest.mark.parametrize("name", CONTROLLERS)
def test_limits_stay_within_the_cap(name: str) -> None:
    board = new_board()
    speculation = BoardSpeculation(board, name, n_draft_max=5)
    server = Server(board, 3, 2)
    for _ in range(200):
        assert 0 <= server.step() <= 5
        assert speculation.step() == 1
    assert board.n_draft_max.min() >= 0
    assert board.n_draft_max.max() <= 5


@pytest.mark.parametrize(("name", "settled"), [("forecast", 80), ("cascade", 80)])
@pytest.mark.parametrize(("n_hold", "is_on"), [(8, True), (0, False)])
def test_good_drafts_turn_it_on_bad_ones_off(name: str, settled: int, n_hold: int, is_on: bool) -> None:
    board = new_board()
    speculation = BoardSpeculation(board, name, n_draft_max=8)
    server = Server(board, 0, n_hold)
    n_drafts = []
    for _ in range(settled + 150):
        n_drafts.append(server.step())
        speculation.step()
    share_on = sum(n > 0 for n in n_drafts[settled:]) / 150
    assert share_on > 0.9 if is_on else share_on < 0.15


def test_slots_are_apart() -> None:
    board = new_board()
    speculation = BoardSpeculation(board, "forecast", n_draft_max=8)
    good, bad = Server(board, 1, 8), Server(board, 2, 0)
    for _ in range(200):
        good.step()
        bad.step()
        speculation.step()
    assert board.n_draft_max[1] == 8
    assert board.n_draft_max[2] <= 1


def test_records_that_were_overwritten_are_left_out() -> None:
    board = new_board()
    seen: list[StepOutcome] = []

    class Listener(Controller):
        name = "listener"

        def next_n_draft(self) -> int:
            return 1

        def _observe(self, outcome: StepOutcome) -> None:
            seen.append(outcome)

    speculation = BoardSpeculation(board, Listener, n_draft_max=4)
    for i in range(N_RECORDS + 10):
        board.record_step(server_slot=0, n_draft=i % 3, n_tokens=1 + i % 3, verify_us=100)
    assert speculation.step() == N_RECORDS
    assert [o.n_draft for o in seen] == [i % 3 for i in range(10, N_RECORDS + 10)]
    assert speculation.step() == 0


def test_earlier_records_are_not_ours() -> None:
    board = new_board()
    board.record_step(server_slot=0, n_tokens=1, verify_us=100)
    assert BoardSpeculation(board, "off", n_draft_max=4).step() == 0


def test_new_request_gets_a_new_controller() -> None:
    board = new_board()
    speculation = BoardSpeculation(board, "forecast", n_draft_max=8)
    server = Server(board, 0, 0)
    for _ in range(50):
        server.step()
        speculation.step()
    speculation.begin(0)
    assert speculation.speculation.slot(0).n_steps == 0
    assert speculation.speculation.shared.table.verify.n_samples(1) > 0, "costs are kept"


def test_cap_zero() -> None:
    board = new_board()
    BoardSpeculation(board, lambda shared: CONTROLLERS["forecast"](shared), n_draft_max=0).step()
    assert board.n_draft_max.max() == 0
    assert Shared(n_draft_max=0).n_draft_max == 0
