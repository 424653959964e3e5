"""Arguments of `pyspac.Llama` with a value for each device: text or list in, the command line's text out."""

from __future__ import annotations

from typing import Any

from pyspac.generate.drop_in_errors import InputError


def text_of_names(name: str, value: Any) -> str:
    """ "CUDA0,CUDA1" of ["CUDA0", "CUDA1"], or of itself. Raises InputError for anything else."""
    return _text(name, value, (str,), "a name")


def text_of_sizes(name: str, value: Any) -> str:
    """ "8000,25%" of [8000, "25%"], or of itself; also of a number. Raises InputError for anything else."""
    return _text(name, value, (str, int, float), "a size")


def _text(name: str, value: Any, kinds: tuple[type, ...], what: str) -> str:
    parts = value if isinstance(value, list | tuple) else (value,)
    if not parts or any(isinstance(part, bool) or not isinstance(part, kinds) for part in parts):
        raise InputError(f"{name} cannot be {value!r}: give {what}, or a list with one for each device")
    return ",".join(str(part) for part in parts)
