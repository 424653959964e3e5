"""Ctrl-C while something is under way: the first one asks it to end, the second one ends the command.

SIGTERM and SIGHUP end the command as an error would: what it has started is ended, too.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, Protocol, Self

_END_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
_EXIT_BY_SIGNAL: Final = 128  # and its number, as shells have it


class Cancellable(Protocol):
    """Something to wait for."""

    def cancel(self) -> None:
        """End it, or what comes next, until `resume`; from a signal handler."""

    def resume(self) -> None:
        """What comes next is not cancelled."""


class Interrupt:
    """True once Ctrl-C was pressed; a second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.is_set = False
        self._cancel: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return self.is_set

    @contextmanager
    def cancels(self, request: Cancellable) -> Iterator[None]:
        """Inside the block the first Ctrl-C cancels `request`, which ends what is waited for."""
        self._cancel = request.cancel
        try:
            if self.is_set:
                request.cancel()
            yield
        finally:
            self._cancel = None
            request.resume()

    @contextmanager
    def ends(self, request: Cancellable) -> Iterator[None]:
        """As `cancels`, of what is of no use unless it is whole: KeyboardInterrupt at its end."""
        try:
            if not self.is_set:
                with self.cancels(request):
                    yield
        finally:
            if self.is_set:
                raise KeyboardInterrupt

    def _handle(self, _signum: int, _frame: object) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        if self._cancel is not None:
            self._cancel()

    @classmethod
    @contextmanager
    def watch(cls) -> Iterator[Self]:
        """Catch SIGINT inside the block. Main thread only."""
        interrupt = cls()
        previous = signal.signal(signal.SIGINT, interrupt._handle)
        try:
            yield interrupt
        finally:
            signal.signal(signal.SIGINT, previous)


@contextmanager
def ends_at_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP raise SystemExit. Main thread only."""
    heard = [number for number in _END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, _end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(_EXIT_BY_SIGNAL + number)
