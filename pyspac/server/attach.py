"""The scheduler as a process: a board's name in, decisions on that board until its server is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Final

from pyspac.engine.board import Board
from pyspac.errors import PyspacError
from pyspac.server import board_file, log
from pyspac.server.attachment import Attachment
from pyspac.server.options import AttachOptions
from pyspac.server.stop_flag import StopFlag

NICENESS: Final = 5  # decisions may be late, tokens should not be


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
        f"{board.n_slots} slots, estimator {options.scheduler.policy}",
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
