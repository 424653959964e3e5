"""llama.cpp's own programs get the engine by PYSPAC_CACHE; what pyspac runs has its own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

VARIABLE: Final = "PYSPAC_CACHE"


@contextmanager
def not_by_environment() -> Iterator[None]:
    """Contexts that are made meanwhile, and programs that are started, do not see the variable."""
    value = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[VARIABLE] = value
