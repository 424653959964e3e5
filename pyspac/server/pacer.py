"""When to step: watches a board's counters, cheaply.

The engine never signals: it must not wait for Python, and a board is plain memory. So the scheduler polls,
every millisecond or two while tokens come, and less and less often when nothing happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pyspac.engine.board import Board

BUSY_POLL_S: Final = 0.0015
IDLE_POLL_S: Final = 0.020
_SLOWDOWN: Final = 1.3  # of the poll period per poll without news
_MAX_REST_S: Final = 0.050
_MAX_DEBT_S: Final = 0.100  # of rest that is still to come, beyond which there is no look-ahead


class Pacer:
    """Says when there is news, and keeps steps below a share of one core."""

    def __init__(
        self,
        board: Board,
        cpu_share: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """cpu_share: of one core; after a step of d seconds the next may start d / cpu_share later."""
        self.board = board
        self.cpu_share = cpu_share
        self.looks_ahead = False  # whether has_look() will be asked: then no sleep is long while tokens come
        self._n_looks = int(board.n_looks[0])
        self._sleep, self._clock = sleep, clock
        self._seen = self._now()
        self._period_s = BUSY_POLL_S
        self._rest_until_s = 0.0  # of steps
        self._look_rest_until_s = 0.0  # of looks, which would leave steps no time otherwise

    def _now(self) -> tuple[int, int]:
        return int(self.board.counters["n_forward"][0]), int(self.board.n_records[0])

    def poll(self) -> bool:
        """Sleep one period, at most 50 ms; whether a forward or a step ended since the last time."""
        rest_s = self._rest_until_s - self._clock()
        if self.looks_ahead and rest_s > self._period_s:
            self._sleep(BUSY_POLL_S)
            return False
        self._sleep(max(self._period_s, min(rest_s, _MAX_REST_S)))
        now = self._now()
        if now == self._seen:
            self._period_s = min(self._period_s * _SLOWDOWN, IDLE_POLL_S)
            return False
        self._seen = now
        self._period_s = BUSY_POLL_S
        return True

    def has_look(self) -> bool:
        """Whether the next tokens were told meanwhile: there is no time to rest first."""
        n_looks = int(self.board.n_looks[0])
        if n_looks == self._n_looks or n_looks % 2 == 1:
            return False
        self._n_looks = n_looks
        return self._look_rest_until_s - self._clock() < _MAX_DEBT_S

    def rest_longer(self, look_s: float) -> None:
        """Looking took `look_s`: that is made up for later."""
        rest_from_s = max(self._look_rest_until_s, self._clock())
        self._look_rest_until_s = rest_from_s + self._rest_s(look_s)

    def rest_after(self, step_s: float) -> None:
        """A step took `step_s`: rest until its share of the time is within bounds."""
        self._rest_until_s = self._clock() + self._rest_s(step_s)

    def _rest_s(self, work_s: float) -> float:
        """Steps and looks have half of the share each, where there are both."""
        share = self.cpu_share / 2 if self.looks_ahead else self.cpu_share
        return work_s * (1 / share - 1)
