"""Speculation control through a board: step records in, draft-length limits out.

For a scheduler process beside a server: `observe` takes in the records that the scheduler's drain has found,
and writes their slots' limits for the next step. A limit takes effect one step late, which the controllers
know (`lag_steps`).

No request is announced: the first record that carries another request than its slot's last one shows it. So
the first step of a request runs under the limit that the slot's last request has left, and the second may, as
every limit is one step late; from then on the new controller's limit holds, whatever the old one had decided
(to draft nothing for hundreds of steps, perhaps).
"""

from __future__ import annotations

from typing import Final

from pyspac.engine.board import Board
from pyspac.engine.step import StepRecord
from pyspac.scheduler.activations import Activity
from pyspac.speculation.cost_table import CostTable
from pyspac.speculation.forecast import Forecast, ForecastBase
from pyspac.speculation.manager import DEFAULT_CONTROLLER, MakeController, Speculation
from pyspac.speculation.match_forecast import MatchForecast
from pyspac.speculation.matches import SHORTEST

LAG_STEPS: Final = 1
NO_REQUEST: Final = -1  # of a record whose writer does not know
NO_LIMIT: Final = -1


class BoardSpeculation:
    """One per board. Its decisions are single aligned integers: they need no decision lock."""

    def __init__(
        self,
        board: Board,
        make_controller: str | MakeController = DEFAULT_CONTROLLER,
        *,
        n_draft_max: int,
        table: CostTable | None = None,
        forecast: type[ForecastBase] = Forecast,
    ) -> None:
        """`n_draft_max`: what the server was started with, which no limit may exceed.

        `table`, `forecast`: as of `Speculation`.
        """
        self.board = board
        self.speculation = Speculation(
            make_controller, n_draft_max=n_draft_max, lag_steps=LAG_STEPS, table=table, forecast=forecast
        )
        board.n_draft_matched[:] = NO_LIMIT  # an earlier scheduler may have left some
        self._requests: dict[int, int] = {}  # by server slot: the last record's
        for slot in range(len(board.n_draft_max)):
            self.speculation.begin(slot)
            self._write(slot)

    def observe(self, activity: Activity) -> None:
        """Take in the records of one drain of the board, and renew their slots' limits."""
        for record in activity.steps:
            self._observe(record)
        for slot in {record.server_slot for record in activity.steps}:
            self._write(slot)

    def _observe(self, record: StepRecord) -> None:
        slot = record.server_slot
        if self._is_new_request(slot, record.request):
            self.speculation.follow(record)
        else:
            self.speculation.observe(record)

    def _is_new_request(self, slot: int, request: int) -> bool:
        """Whether the slot's last record was of another one; the first record of all is of its controller."""
        if request == NO_REQUEST:
            return False
        before, self._requests[slot] = self._requests.get(slot, request), request
        return before != request

    def _write(self, slot: int) -> None:
        """The slot's limits; those that the board has no room for draft as they like."""
        if not 0 <= slot < len(self.board.n_draft_max):
            return
        controller = self.speculation.slot(slot)
        if isinstance(controller, MatchForecast) and controller.next_n_draft():
            limits = self.board.n_draft_matched[slot]
            for kind, n_matched in SHORTEST.items():
                limits[kind] = controller.n_draft_for(n_matched)
        self.board.n_draft_max[slot] = controller.next_n_draft()
