"""A scheduler on an open board: decides, counts and remembers until it is stopped or the server is gone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from pyspac.engine.board import Board
from pyspac.engine.step import StepTotals
from pyspac.model.spec_types import DRAFT_LORA, NGRAM
from pyspac.scheduler.config import TOKEN, SchedulerConfig
from pyspac.scheduler.read_ahead import make_read_ahead
from pyspac.scheduler.scheduler import Scheduler
from pyspac.server import board_file, log, warm_start
from pyspac.server.board_speculation import BoardSpeculation
from pyspac.server.options import AttachOptions
from pyspac.server.pacer import Pacer
from pyspac.server.stop_flag import StopFlag
from pyspac.speculation.cost_table import MaskCosts
from pyspac.speculation.forecast import Forecast
from pyspac.speculation.manager import parse_controller
from pyspac.speculation.match_forecast import MatchForecast

LOOK_PERIOD_S: Final = 0.5  # how often to look whether the server still lives
SAVE_PERIOD_S: Final = 60.0  # so that kill -9 loses little


def _speculation(board: Board, options: AttachOptions) -> BoardSpeculation | None:
    """None: the server drafts as long as it was started with."""
    if not options.has_controller:
        return None
    return BoardSpeculation(
        board,
        parse_controller(options.speculation),
        n_draft_max=options.n_draft_max,
        table=MaskCosts() if options.spec_type == DRAFT_LORA else None,
        forecast=MatchForecast if options.spec_type == NGRAM else Forecast,
    )


def _placing(board: Board, config: SchedulerConfig) -> SchedulerConfig:
    """Without slots there is nothing to copy for `token`: it reads ahead, or does nothing."""
    if board.group_slots.any():
        return config
    return replace(config, predict=tuple(name for name in config.predict if name != TOKEN))


class Attachment:
    """A scheduler on an open board, with what it learned before and what may be watched."""

    def __init__(self, name: str | None, board: Board, options: AttachOptions) -> None:
        """`name`: the board's, where it is another process's; None: it is there until it is told to stop."""
        self.name = name
        self.board = board
        self.options = options
        self.scheduler = Scheduler(board, _placing(board, options.scheduler))
        self.read_ahead = make_read_ahead(board, options.scheduler.predict)
        self.speculation = _speculation(board, options)
        self.totals = StepTotals()
        self._file = None if name is None else board_file.look_at(name)
        self._memory = warm_start.open_store(options.model) if options.warm_start else None
        self._next_look_s = self._next_save_s = 0.0

    def run(self, stop: StopFlag) -> None:
        """Decide until told to stop or the server is gone; then keep what was learned."""
        pacer = Pacer(self.board, self.options.cpu_share)
        pacer.looks_ahead = self._looks_ahead
        self._next_save_s = time.monotonic() + SAVE_PERIOD_S
        try:
            while not stop and self._is_server_there():
                if pacer.poll():
                    pacer.rest_after(self._step())
                if pacer.looks_ahead and pacer.has_look():
                    pacer.rest_longer(self._look_ahead())
        finally:
            self.board.looks_ahead[0] = 0
            self._keep()

    @property
    def _looks_ahead(self) -> bool:
        return self.scheduler.foresight is not None or self.read_ahead is not None

    def _step(self) -> float:
        """One decision; the CPU time that it took: while others compute, waiting for a core costs nothing."""
        start = time.thread_time()
        self.board.looks_ahead[0] = self._looks_ahead  # again: a board may be written anew
        self.scheduler.step()
        if self.read_ahead is not None:
            self.read_ahead.learn()
        activity = self.scheduler.activity
        if self.speculation is not None:
            self.speculation.observe(activity)
        self.totals.add(activity.steps, activity.totals.n_lost)
        return time.thread_time() - start

    def _look_ahead(self) -> float:
        """Plan for the tokens that the server told of; the CPU time that it took."""
        start = time.thread_time()
        if tokens := self.board.read_upcoming():
            (self.read_ahead or self.scheduler).look_ahead(tokens)
        return time.thread_time() - start

    def _is_server_there(self) -> bool:
        """Looked at twice a second; saves on the way."""
        now = time.monotonic()
        if now >= self._next_save_s:
            self._next_save_s = now + SAVE_PERIOD_S
            self._keep()
        if self.name is None or now < self._next_look_s:
            return True
        self._next_look_s = now + LOOK_PERIOD_S
        found = board_file.look_at(self.name)
        is_there = found is not None and found == self._file and found.is_alive
        if not is_there:
            log.event(f'board "{self.name}": its server is gone', board=self.name)
        return is_there

    def recall(self) -> None:
        """Start from what the last run learned, or from nothing; either way decide once, before any token."""
        if self._memory is not None and self._memory.recall(self.scheduler):
            log.event("utilities of the last run were loaded", file=str(self._memory.path))
        self._step()

    def _keep(self) -> None:
        if self._memory is None or self.scheduler.times.n_steps < 2:
            return
        try:
            self._memory.keep(self.scheduler)
        except OSError as error:
            log.warning(f"utilities cannot be saved to {self._memory.path}: {error.strerror}")
