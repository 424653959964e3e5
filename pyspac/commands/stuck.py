"""Ctrl-C where the main thread hangs in native code: the second one ends the process.

Python runs the handlers of signals in the main thread, between two of its instructions. While that thread
waits in llama.cpp, for an RPC server that has frozen for instance, there is no such moment. So a thread of
its own hears of signals, through the descriptor that Python's C handler writes to.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec

from pyspac.commands.common import reports_errors
from pyspac.errors import EXIT_INTERRUPTED

P = ParamSpec("P")
_GRACE_S: Final = 0.5  # a signal may wake the main thread, which then comes to its next instruction
_main_ran: Final = threading.Event()  # since the last interrupt
_main_ran.set()


def _note(_nothing: object) -> int:
    _main_ran.set()
    return 0


_CALLBACK: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_note)


def ends_where_stuck(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose main thread computes: what handles Ctrl-C otherwise stays as it is."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        with _watched():
            command(*args, **kwargs)

    return wrapper


def computes(command: Callable[P, None]) -> Callable[P, None]:
    """`reports_errors` for a command that computes."""
    return reports_errors(ends_where_stuck(command))


@contextmanager
def _watched() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # signals are none of its business
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reader,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # the thread ends


def _listen(reader: int) -> None:
    """End the process at an interrupt before which the main thread has not run since the last one."""
    with open(reader, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] != signal.SIGINT:
                continue
            if not _main_ran.wait(_GRACE_S):
                os.write(sys.stderr.fileno(), b"\npyspac: interrupted; llama.cpp did not return\n")
                os._exit(EXIT_INTERRUPTED)
            _main_ran.clear()
            # by the main thread, between two instructions
            ctypes.pythonapi.Py_AddPendingCall(_CALLBACK, None)
