"""pyspac.server.board_speculation: records in, limits out, one step late."""

from __future__ import annotations

import pytest

from pyspac._native import lib
from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.engine.step import StepRecord
from pyspac.scheduler.activations import ActivationDrain
from pyspac.server.board_speculation import BoardSpeculation
from pyspac.speculation.controller import Controller, Shared
from pyspac.speculation.manager import CONTROLLERS, MakeController
from pyspac.speculation.match_forecast import MatchForecast

COSTS = [10_000 * x for x in (1, 1.6, 2.1, 2.6, 3.0, 3.3, 3.6, 3.9, 4.2)]


class Attached:
    """BoardSpeculation as an attachment runs it: fed by a drain of the board."""

    def __init__(self, board: LocalBoard, controller: str | MakeController, n_draft_max: int) -> None:
        self.drain = ActivationDrain(board)
        self.on_board = BoardSpeculation(board, controller, n_draft_max=n_draft_max)
        self.speculation = self.on_board.speculation

    def step(self) -> int:
        """Returns how many records there were."""
        activity = self.drain.drain()
        self.on_board.observe(activity)
        return len(activity.steps)


class Listener(Controller):
    """Keeps what it hears."""

    name = "listener"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.heard: list[StepRecord] = []

    def next_n_draft(self) -> int:
        return 1

    def _observe(self, record: StepRecord) -> None:
        self.heard.append(record)


class Server:
    """Plays the server: drafts up to the limit it saw one step ago."""

    def __init__(self, board: LocalBoard, slot: int, n_hold: int) -> None:
        self.board, self.slot, self.n_hold = board, slot, n_hold
        self.limit = int(board.n_draft_max[slot])
        self.request = 0
        self.n_tokens = 0
        self.total_us = 0.0

    def step(self) -> int:
        n_draft, self.limit = self.limit, int(self.board.n_draft_max[self.slot])
        n_accepted = min(n_draft, self.n_hold)
        us = COSTS[n_draft]
        self.board.record_step(StepRecord(
            server_slot=self.slot, request=self.request, n_draft=n_draft, n_accepted=n_accepted,
            n_tokens=1 + n_draft, verify_us=int(us), process_us=20,
        ))  # fmt: skip
        self.n_tokens += 1 + n_accepted
        self.total_us += us
        return n_draft


def new_board() -> LocalBoard:
    return LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=8, n_expert_used=2, n_slots=4))


@pytest.mark.parametrize("name", CONTROLLERS)
def test_limits_stay_within_the_cap(name: str) -> None:
    board = new_board()
    speculation = Attached(board, name, n_draft_max=5)
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
    speculation = Attached(board, name, n_draft_max=8)
    server = Server(board, 0, n_hold)
    n_drafts = []
    for _ in range(settled + 150):
        n_drafts.append(server.step())
        speculation.step()
    share_on = sum(n > 0 for n in n_drafts[settled:]) / 150
    assert share_on > 0.9 if is_on else share_on < 0.15


def test_slots_are_apart() -> None:
    board = new_board()
    speculation = Attached(board, "forecast", n_draft_max=8)
    good, bad = Server(board, 1, 8), Server(board, 2, 0)
    for _ in range(200):
        good.step()
        bad.step()
        speculation.step()
    assert board.n_draft_max[1] == 8
    assert board.n_draft_max[2] <= 1


@pytest.mark.parametrize("slot", [lib.SPAC_N_SERVER_SLOTS, 1000, -1])
def test_slots_that_the_board_has_no_limit_for(slot: int) -> None:
    board = new_board()
    speculation = Attached(board, "forecast", n_draft_max=8)
    before = board.n_draft_max.tolist()
    for _ in range(50):
        board.record_step(StepRecord(server_slot=slot, n_draft=4, n_tokens=5, verify_us=1000))
        assert speculation.step() == 1
    assert board.n_draft_max.tolist() == before


def heard(speculation: Attached) -> list[StepRecord]:
    listener = speculation.speculation.slot(0)
    assert isinstance(listener, Listener)
    return listener.heard


def test_records_that_were_overwritten_are_left_out() -> None:
    board = new_board()
    speculation = Attached(board, Listener, n_draft_max=4)
    for i in range(lib.SPAC_N_RECORDS + 10):
        board.record_step(StepRecord(n_draft=i % 3, n_tokens=1 + i % 3, verify_us=100))
    assert speculation.step() == lib.SPAC_N_RECORDS - 1
    assert [record.n_draft for record in heard(speculation)] == [
        i % 3 for i in range(11, lib.SPAC_N_RECORDS + 10)
    ]
    assert speculation.step() == 0


def test_earlier_records_are_not_ours() -> None:
    board = new_board()
    board.record_step(StepRecord(server_slot=0, n_tokens=1, verify_us=100))
    assert Attached(board, "off", n_draft_max=4).step() == 0


def backed_off(name: str) -> tuple[Attached, Server]:
    """A slot whose request drafted in vain for long."""
    board = new_board()
    speculation = Attached(board, name, n_draft_max=8)
    server = Server(board, 0, 0)
    for _ in range(400):
        server.step()
        speculation.step()
    assert board.n_draft_max[0] == 0
    return speculation, server


def test_a_new_request_gets_a_new_controller() -> None:
    speculation, server = backed_off("forecast")
    before = speculation.speculation.slot(0)
    n_passes = speculation.speculation.shared.table.passes.n_observed
    server.request = 7
    server.step()
    speculation.step()
    after = speculation.speculation.slot(0)
    assert after is not before
    assert after.n_steps == 0, "the first step was decided before it"
    assert before.n_steps == 401, "by the one before, which pays for it"
    assert speculation.speculation.shared.table.passes.n_observed >= n_passes, "costs are kept"
    server.step()
    speculation.step()
    assert speculation.speculation.slot(0) is after


@pytest.mark.parametrize("name", ["forecast", "cascade"])
def test_back_off_does_not_outlive_its_request(name: str) -> None:
    """The old limit rules the first step of the next request and, late as limits are, the second."""
    speculation, server = backed_off(name)
    server.request, server.n_hold = 1, 8
    n_drafts = []
    for _ in range(40):
        n_drafts.append(server.step())
        speculation.step()
    assert n_drafts[0] == 0
    assert max(n_drafts[:34]) > 0
    assert min(n_drafts[36:]) > 0


def test_slots_of_one_board_have_their_own_requests() -> None:
    board = new_board()
    speculation = Attached(board, "forecast", n_draft_max=8)
    servers = [Server(board, 0, 0), Server(board, 1, 0)]
    servers[1].request = 1
    controllers = [speculation.speculation.slot(slot) for slot in (0, 1)]
    for _ in range(3):
        for server in servers:
            server.step()
        speculation.step()
    assert [speculation.speculation.slot(slot) for slot in (0, 1)] == controllers


def test_a_writer_that_does_not_know_the_request_starts_none() -> None:
    board = new_board()
    speculation = Attached(board, "forecast", n_draft_max=8)
    controller = speculation.speculation.slot(0)
    for request in (3, -1, 3, -1):
        board.record_step(StepRecord(server_slot=0, request=request, n_tokens=1, verify_us=100))
    speculation.step()
    assert speculation.speculation.slot(0) is controller


def test_limits_are_written_outside_of_a_decision() -> None:
    board = new_board()
    speculation = Attached(board, "forecast", n_draft_max=8)
    Server(board, 0, 8).step()
    speculation.step()
    assert board.decision_seq[0] == 0


def test_cap_zero() -> None:
    board = new_board()
    Attached(board, lambda shared: CONTROLLERS["forecast"](shared), n_draft_max=0).step()
    assert board.n_draft_max.max() == 0
    assert Shared(n_draft_max=0).n_draft_max == 0


def test_drafts_by_matches_have_a_limit_for_each_length() -> None:
    """Matches of 2 and 3 tokens never hold, longer ones do; what was passed over is learned from, too."""
    board = LocalBoard(BoardGeometry.uniform(n_layer=1, n_expert=1, n_expert_used=1, n_slots=1))
    drain = ActivationDrain(board)
    on_board = BoardSpeculation(board, n_draft_max=8, forecast=MatchForecast)
    assert (board.n_draft_matched[5] == -1).all(), "the plain step's time comes first"
    for i in range(600):
        n_matched = (2, 16)[i % 2]
        kind = {2: 2, 16: 6}[n_matched]
        limit = int(board.n_draft_matched[5][kind]) if board.n_draft_max[5] else 0
        n_draft = max(0, limit)
        n_held = n_draft if n_matched == 16 else 0
        board.record_step(
            StepRecord(step=i, server_slot=5, n_draft=n_draft, n_accepted=n_held, n_tokens=1 + n_draft,
                       verify_us=COSTS[n_draft], n_matched=n_matched,
                       n_passed_over=0 if i < 50 else -2)
        )  # fmt: skip
        on_board.observe(drain.drain())
    assert int(board.n_draft_max[5]) == 8, "the drafter looks for a match"
    assert board.n_draft_matched[5].tolist()[2:3] == [0]
    assert board.n_draft_matched[5][6] >= 5
    assert (board.n_draft_matched[5][1:] >= 0).all()
    BoardSpeculation(board, n_draft_max=8)
    assert (board.n_draft_matched == -1).all(), "one length for all again"
