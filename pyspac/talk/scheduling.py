"""A scheduler in this process: a board in, a thread that decides on it out."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

from pyspac.engine.board import Board
from pyspac.errors import NoProcessError
from pyspac.server import log
from pyspac.server.attach import NICENESS, sole_scheduler
from pyspac.server.attachment import Attachment
from pyspac.server.options import AttachOptions
from pyspac.server.stop_flag import StopFlag


@contextlib.contextmanager
def scheduling(board: Board, options: AttachOptions, name: str | None = None) -> Iterator[Attachment]:
    """Inside the block a thread decides on the board; it has decided once before the block begins.

    `name`: of the board, where its engine is in another process. A process that ends inside the block, or a
    fork of it, does not wait for the thread.
    """
    stop = StopFlag()
    with contextlib.nullcontext() if name is None else sole_scheduler(name):
        attachment = Attachment(name, board, options)
        attachment.recall()
        thread = threading.Thread(target=_run, args=(attachment, stop), daemon=True)

        def end() -> None:
            stop.is_set = True
            thread.join()  # a decision takes milliseconds, and the board is gone after this

        try:
            thread.start()
        except RuntimeError as error:
            raise NoProcessError("the scheduler's thread cannot be started") from error
        atexit.register(end)  # later no thread runs any more, and join would wait for ever
        try:
            yield attachment
        finally:
            atexit.unregister(end)
            end()


def _run(attachment: Attachment, stop: StopFlag) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread, on Linux
    try:
        attachment.run(stop)
    except Exception as error:  # the server goes on without: the engine's own policy decides
        log.warning(f"the scheduler has stopped ({error!r}); please report this")
