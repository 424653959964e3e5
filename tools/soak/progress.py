"""One line that says what is going on."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console

SAY_S: Final = 30.0  # between two lines of progress where there is no terminal


class Progress:
    """One line that says what is going on: at the bottom of a terminal, now and then in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._said_s = 0.0

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._status:
            self._status.stop()

    def phase(self, text: str) -> None:
        """Something new begins."""
        self._console.print(text, markup=False)

    def update(self, text: str) -> None:
        """How far it is."""
        if self._status:
            self._status.update(text)
        elif time.monotonic() > self._said_s + SAY_S:
            self._said_s = time.monotonic()
            self._console.print(text, markup=False)
