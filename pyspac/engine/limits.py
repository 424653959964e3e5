"""The engine's limits, read from spac.h through the native module, so that no number is written twice.

Only what loads the engine anyway imports this. Settings by themselves (pyspac.scheduler.config,
pyspac.forward.options) and the lab work without it, and know only lower bounds.
"""

from __future__ import annotations

from typing import Final

from pyspac._native import lib
from pyspac.errors import ConfigError
from pyspac.units import MIB

MAX_BATCH: Final = int(lib.SPAC_MAX_BATCH)  # tokens of the widest batch that can be split
MAX_THREADS: Final = int(lib.SPAC_MAX_THREADS)  # of a context, and of the host executor
# of a device's free memory: what the cache "auto" leaves, and what one of a given size has to
AUTO_MARGIN_BYTES: Final = int(lib.SPAC_AUTO_MARGIN_MIB) * MIB
MIN_MARGIN_BYTES: Final = int(lib.SPAC_MIN_MARGIN_MIB) * MIB


def check_max_batch(name: str, n_tokens: int) -> None:
    """Raise ConfigError, which calls the setting `name`, unless the engine can split batches so wide."""
    if not 1 <= n_tokens <= MAX_BATCH:
        raise ConfigError(name, n_tokens, f"a number of tokens from 1 to {MAX_BATCH}")


def check_n_threads(name: str, n_threads: int, low: int) -> None:
    """Raise ConfigError, which calls the setting `name`, unless ggml can run so many."""
    if not low <= n_threads <= MAX_THREADS:
        raise ConfigError(name, n_threads, f"a number of threads from {low} to {MAX_THREADS}")
