"""Values that libspac reads from text: its rules hold for options, llama-server's flags and the environment.

In: the text. Out: what libspac made of it, or a UsageError with its sentence. Nothing is loaded before the
first call, so that settings can be described without the library.
"""

from __future__ import annotations

import os
from typing import Final, Literal

from pyspac.errors import UsageError

AUTO: Final = "auto"


def read_size(name: str, text: str, total_bytes: int) -> int | None:
    """Bytes of "8000" (MiB), "8000M", "8G", "8000B" or "25%" of `total_bytes`; None: "auto".

    `name`: the option, for the error.
    """
    if text == AUTO:
        return None
    from pyspac._native import ffi, lib

    n_bytes = ffi.new("uint64_t *")
    check_value(lib.spac_read_size(os.fsencode(name), os.fsencode(text), total_bytes, n_bytes))
    return int(n_bytes[0])


def check_variable(variable: str, text: str, name: str | None = None) -> None:
    """Raise UsageError unless the engine's environment variable may have this value; others pass.

    `name`: what the error calls it; None: the variable.
    """
    from pyspac._native import lib

    check_value(lib.spac_check_value(*map(os.fsencode, (variable, name or variable, text))))


def read_cpu_range(text: str) -> set[int]:
    """The cores of a range such as "0-7", all open to this process."""
    from pyspac._native import ffi, lib

    first, last = ffi.new("int32_t *"), ffi.new("int32_t *")
    check_value(lib.spac_read_cpu_range(os.fsencode(text), first, last))
    return set(range(first[0], last[0] + 1))


DeviceKind = Literal["auto", "none", "emulated", "named"]
_DEVICE_KINDS: Final[tuple[DeviceKind, ...]] = (
    "auto",
    "none",
    "emulated",
    "named",
)  # index = spac_device_kind


def read_device_kind(name: str) -> DeviceKind:
    """What the name of a device says by itself: "cpu" is the old name of "emulated"."""
    from pyspac._native import ffi, lib

    kind = ffi.new("int32_t *")
    check_value(lib.spac_read_device_kind(os.fsencode(name), kind))
    return _DEVICE_KINDS[int(kind[0])]


def check_value(status: int) -> None:
    """Raise UsageError if that is what libspac says of a value."""
    from pyspac._native import ffi, lib

    if status == lib.SPAC_STATUS_INVALID_ARGUMENT:
        raise UsageError(ffi.string(lib.spac_last_error()).decode(errors="replace"))
