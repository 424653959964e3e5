"""What the user lets the engine leave out: `--lossy KIND:STRENGTH`, read and checked (SpecMD, 3.1.2)."""

from __future__ import annotations

from typing import Final

from pyspac.engine.values import read_lossy
from pyspac.errors import UsageError

FLAG: Final = "--lossy"
VARIABLE: Final = "PYSPAC_LOSSY"


def check_lossy(text: str | None, *, stock: bool) -> None:
    """Raise UsageError unless it is None, "drop:N" or "substitute:X", and with plain llama.cpp."""
    if text is None:
        return
    read_lossy(FLAG, text)
    if stock:
        raise UsageError(f"{FLAG} {text} has no effect with --stock, which computes every expert: omit one")


def check_can_be_lossy(text: str | None, *, is_host_only: bool, ram_bytes: int | None) -> None:
    """Raise UsageError where every expert is there, or none that could stand in for another one."""
    if text is not None and is_host_only and ram_bytes is None:
        raise UsageError(
            f"{FLAG} {text} needs a device, or experts on disk (--ram): all are in memory; omit {FLAG}"
        )
    if text is not None and is_host_only and not read_lossy(FLAG, text):
        raise UsageError(f"{FLAG} {text} needs a device, whose experts stand in for others: give drop:N")
