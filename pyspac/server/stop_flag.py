"""Whether this process was told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Self


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
