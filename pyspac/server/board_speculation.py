"""Speculation control through a board: step records in, draft-length limits out.

For a scheduler process beside a server: `step()` reads the records written since the last call, and writes
their slots' limits for the next step. A limit takes effect one step late, which the controllers know
(`lag_steps`).

No request is announced: the first record that carries another request than its slot's last one shows it. So
the first step of a request runs under the limit that the slot's last request has left, and the second may, as
every limit is one step late; from then on the new controller's limit holds, whatever the old one had decided
(to draft nothing for hundreds of steps, perhaps).
"""

from __future__ import annotations

from typing import Any, Final

from pyspac.engine.board import N_RECORDS, N_SERVER_SLOTS, BoardView
from pyspac.speculation.manager import DEFAULT_CONTROLLER, MakeController, Speculation
from pyspac.speculation.outcome import StepOutcome

LAG_STEPS: Final = 1
NO_REQUEST: Final = -1  # of a record whose writer does not know


class BoardSpeculation:
    """One per board. Its decisions are single aligned integers: they need no decision lock."""

    def __init__(
        self,
        board: BoardView,
        make_controller: str | MakeController = DEFAULT_CONTROLLER,
        *,
        n_draft_max: int,
    ) -> None:
        """`n_draft_max`: what the server was started with, which no limit may exceed."""
        self.board = board
        self.speculation = Speculation(make_controller, n_draft_max=n_draft_max, lag_steps=LAG_STEPS)
        self._n_read = int(board.n_records[0])
        self._requests: dict[int, int] = {}  # by server slot: the last record's
        for slot in range(N_SERVER_SLOTS):
            self._write(slot, 0 if n_draft_max == 0 else self.speculation.begin(slot).next_n_draft())

    def step(self) -> int:
        """Take in new records and renew limits; returns how many records there were."""
        n_written = int(self.board.n_records[0])
        n_new = min(n_written - self._n_read, N_RECORDS)  # older ones are overwritten
        for index in range(n_written - n_new, n_written):
            self._observe(self.board.records[index % N_RECORDS])
        self._n_read = n_written
        return n_new

    def _observe(self, record: Any) -> None:
        outcome = _outcome(record)
        if self._is_new_request(outcome.slot, int(record["request"])):
            self.speculation.follow(outcome)
        else:
            self.speculation.observe(outcome)
        self._write(outcome.slot, self.speculation.next_n_draft(outcome.slot))

    def _is_new_request(self, slot: int, request: int) -> bool:
        """Whether the slot's last record was of another one; the first record of all is of its controller."""
        if request == NO_REQUEST:
            return False
        before, self._requests[slot] = self._requests.get(slot, request), request
        return before != request

    def _write(self, slot: int, n_draft: int) -> None:
        self.board.n_draft_max[slot] = n_draft


def _outcome(record: Any) -> StepOutcome:
    return StepOutcome(
        slot=int(record["server_slot"]),
        n_draft=int(record["n_draft"]),
        n_accepted=int(record["n_accepted"]),
        n_tokens=int(record["n_tokens"]),
        draft_us=int(record["draft_us"]),
        verify_us=int(record["verify_us"]),
        process_us=int(record["process_us"]) + int(record["sample_us"]),
    )
