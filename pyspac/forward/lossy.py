"""What the user lets the engine leave out: `--lossy KIND:N`, read and checked (SpecMD, 3.1.2)."""

from __future__ import annotations

from typing import Final

from pyspac.errors import ConfigError, UsageError

FLAG: Final = "--lossy"
VARIABLE: Final = "PYSPAC_LOSSY"
_DROP: Final = "drop"
_MAX_N: Final = 2**15 - 1  # as in engine/src/split/lossy.cpp


def check_lossy(text: str | None, *, stock: bool) -> None:
    """Raise ConfigError unless it is None or "drop:N" with N from 1 on; UsageError with plain llama.cpp."""
    if text is None:
        return
    kind, _, n = text.partition(":")
    if kind != _DROP or not (n.isascii() and n.isdecimal()) or not 1 <= int(n) <= _MAX_N:
        wanted = "drop:N: each token's best N experts, 1 or more, are always computed"
        raise ConfigError(FLAG, text, wanted)
    if stock:
        raise UsageError(f"{FLAG} {text} has no effect with --stock, which computes every expert: omit one")


def check_can_be_lossy(text: str | None, *, is_host_only: bool, ram_bytes: int | None) -> None:
    """Raise UsageError where every expert is in memory, so that none could be left out."""
    if text is not None and is_host_only and ram_bytes is None:
        raise UsageError(
            f"{FLAG} {text} needs a device, or experts on disk (--ram): all are in memory; omit {FLAG}"
        )
