"""llama.cpp's own programs get the engine by these variables; what pyspac runs has its own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

VARIABLE: Final = "PYSPAC_CACHE"
TRACE: Final = "PYSPAC_TRACE"  # a file for what routers choose: recording needs no PYSPAC_CACHE


@contextmanager
def not_by_environment() -> Iterator[None]:
    """Contexts that are made meanwhile, and programs that are started, do not see the variables."""
    values = {name: os.environ.pop(name) for name in (VARIABLE, TRACE) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)
