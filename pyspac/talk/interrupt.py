"""Ctrl-C while something is under way: the first one asks it to end, the second one ends the command."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self


class Interrupt:
    """True once Ctrl-C was pressed; a second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.is_set = False
        self._cancel: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return self.is_set

    @contextmanager
    def cancels(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Inside the block the first Ctrl-C calls `cancel`, which ends what is waited for."""
        self._cancel = cancel
        try:
            if self.is_set:
                cancel()
            yield
        finally:
            self._cancel = None

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
