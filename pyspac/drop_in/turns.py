"""One `Llama` and several threads: what computes has the object to itself, one call after the other.

A stream holds no lock between two tokens, as its reader may have left. If another text is begun there, the
context holds that one, and the first is over: an error instead of nonsense.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

from pyspac.drop_in.errors import DecodeError

T = TypeVar("T")
Tokens = Generator[int, Sequence[int] | None, None]


class Turns:
    """Of one object."""

    def __init__(self) -> None:
        self.lock: Final = threading.RLock()  # one call of an object's uses others
        self._text: object = None  # that was begun last

    def text(self, tokens: Tokens) -> Tokens:
        """The same tokens, each of them in a turn of its own; the text before is over."""
        self._text = mine = object()
        return self._go_on(tokens, mine)

    def _go_on(self, tokens: Tokens, mine: object) -> Tokens:
        given = None
        while True:
            with self.lock:
                if self._text is not mine:
                    raise DecodeError(
                        "another text was begun on this Llama before this one was complete: one object "
                        "makes one at a time; finish it first, or make a Llama for each"
                    )
                try:
                    token = tokens.send(given)
                except StopIteration:
                    return
            given = yield token


def in_turn(method: Callable[..., T]) -> Callable[..., T]:
    """A method that waits until no other thread computes; `self._turns` says who does."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> T:
        with self._turns.lock:
            return method(self, *args, **kwargs)

    return wrapper
