"""The scheduler as a process: a board's name in, decisions on that board until its server is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final, Self

from pyspac.engine.board import Board
from pyspac.errors import PyspacError
from pyspac.scheduler.scheduler import Scheduler
from pyspac.server import board_file, log, warm_start
from pyspac.server.board_speculation import BoardSpeculation
from pyspac.server.options import AttachOptions
from pyspac.server.pacer import Pacer
from pyspac.server.totals import StepTotals
from pyspac.speculation.manager import parse_controller

LOOK_PERIOD_S: Final = 0.5  # how often to look whether the server still lives
SAVE_PERIOD_S: Final = 60.0  # so that kill -9 loses little
NICENESS: Final = 5  # decisions may be late, tokens should not be


class StopFlag:
    """Set by SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.is_set = False

    @classmethod
    @contextlib.contextmanager
    def watch(cls) -> Iterator[Self]:
        flag = cls()
        before = {number: signal.signal(number, flag._set) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield flag
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True

    def __bool__(self) -> bool:
        return self.is_set


@contextlib.contextmanager
def sole_scheduler(name: str) -> Iterator[None]:
    """Hold the lock on a board's file, as two schedulers would overwrite each other."""
    path = board_file.path_of(name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PyspacError(f'board "{name}" cannot be read: {error.strerror}') from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise PyspacError(
            f'board "{name}" has a scheduler already; stop that one first (`pyspac serve` starts its own)'
        ) from error
    finally:
        os.close(descriptor)


def _speculation(board: Board, options: AttachOptions) -> BoardSpeculation | None:
    """None: the server drafts as long as it was started with."""
    if not options.has_controller:
        return None
    return BoardSpeculation(board, parse_controller(options.speculation), n_draft_max=options.n_draft_max)


class Attachment:
    """A scheduler on an open board, with what it learned before and what may be watched."""

    def __init__(self, name: str, board: Board, options: AttachOptions) -> None:
        self.name = name
        self.board = board
        self.options = options
        self.scheduler = Scheduler(board, options.scheduler)
        self.speculation = _speculation(board, options)
        self.totals = StepTotals()
        self._file = board_file.look_at(name)
        self._memory = warm_start.open_store(options.model) if options.warm_start else None
        self._next_look_s = self._next_save_s = 0.0

    def run(self, stop: StopFlag) -> None:
        """Decide until told to stop or the server is gone; then keep what was learned."""
        pacer = Pacer(self.board, self.options.cpu_share)
        self._next_save_s = time.monotonic() + SAVE_PERIOD_S
        try:
            while not stop and self._is_server_there():
                if pacer.poll():
                    pacer.rest_after(self._step())
        finally:
            self._keep()

    def _step(self) -> float:
        """One decision; how long it took."""
        start = time.perf_counter()
        self.scheduler.step()
        if self.speculation is not None:
            self.speculation.step()
        self.totals.add(self.scheduler.last_record)
        return time.perf_counter() - start

    def _is_server_there(self) -> bool:
        """Looked at twice a second; saves on the way."""
        now = time.monotonic()
        if now >= self._next_save_s:
            self._next_save_s = now + SAVE_PERIOD_S
            self._keep()
        if now < self._next_look_s:
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


def run_attached(name: str, options: AttachOptions) -> None:
    """`pyspac attach`. Raises a PyspacError if there is no such board, or it cannot be used."""
    with StopFlag.watch() as stop, sole_scheduler(name), Board.open(name) as board:
        _check_alive(name)
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        attachment = Attachment(name, board, options)
        with _metrics(attachment):
            attachment.recall()
            _say_attached(name, board, options)
            attachment.run(stop)


def _say_attached(name: str, board: Board, options: AttachOptions) -> None:
    sizes = {field: getattr(board, field) for field in ("n_layer", "n_expert", "n_slots")}
    log.event(
        f'scheduler of board "{name}": {board.n_layer} layers x {board.n_expert} experts, '
        f"{board.n_slots} slots, estimator {options.scheduler.estimator}",
        event="attached",
        board=name,
        **sizes,
    )


def _check_alive(name: str) -> None:
    found = board_file.look_at(name)
    if found is None or not found.is_alive:
        raise PyspacError(f'board "{name}" was left behind by a process that is gone; start the server again')


@contextlib.contextmanager
def _metrics(attachment: Attachment) -> Iterator[None]:
    options = attachment.options
    if options.metrics_port is None:
        yield
        return
    from pyspac.server.exporter import serve_metrics  # needs prometheus_client

    with serve_metrics(attachment, options.metrics_host, options.metrics_port):
        yield
