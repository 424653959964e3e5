"""The scheduler of a server of this process's own: a board's name in, a thread that decides on it out."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from pyspac.engine.board import Board
from pyspac.server import log
from pyspac.server.attach import NICENESS, sole_scheduler
from pyspac.server.attachment import Attachment
from pyspac.server.options import AttachOptions
from pyspac.server.stop_flag import StopFlag

_JOIN_S = 3.0


@contextlib.contextmanager
def scheduling(name: str, board: Board, options: AttachOptions) -> Iterator[Attachment]:
    """Inside the block a thread decides on the board; it has decided once before the block begins."""
    stop = StopFlag()
    with sole_scheduler(name):
        attachment = Attachment(name, board, options)
        attachment.recall()
        thread = threading.Thread(target=_run, args=(attachment, stop), daemon=True)
        thread.start()
        try:
            yield attachment
        finally:
            stop.is_set = True
            thread.join(_JOIN_S)


def _run(attachment: Attachment, stop: StopFlag) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread, on Linux
    try:
        attachment.run(stop)
    except Exception as error:  # the server goes on without: the engine's own policy decides
        log.warning(f"the scheduler has stopped ({error!r}); please report this")
