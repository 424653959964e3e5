"""Sizes: text that is read, and text that is shown."""

import re
from typing import Final

from pyspac.errors import UsageError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
AUTO: Final = "auto"
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)(%|B|[MG](?:i?B)?)?", re.IGNORECASE | re.ASCII)
_UNITS: Final = {"B": 1, "M": MIB, "G": GIB}
_MOST: Final = 10**9 * MIB  # more than that is a slip


def read_size(flag: str, text: str, total_bytes: int) -> int | None:
    """Bytes of "8000" (MiB), "8000M", "8G", "8000B" or "25%" of `total_bytes`; None: "auto".

    The engine reads what llama-server and the environment say by the same rule (spac_size_bytes). Raises
    UsageError, which names `flag`.
    """
    if text == AUTO:
        return None
    match = _SIZE.fullmatch(text)
    number, unit = (float(match[1]), (match[2] or "M").upper()[0]) if match else (-1.0, "M")
    most = 100.0 if unit == "%" else _MOST / _UNITS[unit]
    if not 0.0 <= number <= most:
        raise UsageError(
            f"{flag} {text} is no size: give MiB (8000), GiB (8G), a share of all experts (25%), or auto"
        )
    return int(number / 100 * total_bytes + 0.5) if unit == "%" else int(number * _UNITS[unit])


def size_text(n_bytes: float) -> str:
    """Say a size for people: in MiB below 1 GiB, else in GiB."""
    if round(n_bytes / MIB) < GIB // MIB:
        return f"{n_bytes / MIB:.4g} MiB"
    return f"{n_bytes / GIB:,.2f}".rstrip("0").rstrip(".") + " GiB"
