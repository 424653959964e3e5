"""Arguments of `pyspac.Llama` as callers give them: text, lists and paths in, what RunOptions takes out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pyspac.generate.draft_files import spec_type_of
from pyspac.generate.drop_in_errors import InputError, as_input_error
from pyspac.generate.tensor_split import parse_tensor_split
from pyspac.model.gguf_header import read_header


def text_of_names(name: str, value: Any) -> str:
    """ "CUDA0,CUDA1" of ["CUDA0", "CUDA1"], or of itself. Raises InputError for anything else."""
    return _text(name, value, (str,), "a name")


def text_of_sizes(name: str, value: Any) -> str:
    """ "8000,25%" of [8000, "25%"], or of itself; also of a number. Raises InputError for anything else."""
    return _text(name, value, (str, int, float), "a size")


def with_shares(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same with `tensor_split`, a list or text, as numbers. Raises InputError for what are no shares."""
    shares = kwargs.get("tensor_split")
    if shares is None:
        return kwargs
    with as_input_error():
        text = _text("tensor_split", shares, (str, int, float), "shares of the layers")
        return kwargs | {"tensor_split": list(parse_tensor_split(text))}


def file_of(name: str, value: Any) -> Path | None:
    """The path of a file; None of None. Raises InputError for what is no path."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise InputError(f"{name} cannot be {value!r}: give the path of a GGUF file")
    return Path(value)


def draft_file(value: Any) -> Path | None:
    """The same of a draft model. Raises InputError for a draft that cannot run by itself, ModelError."""
    path = file_of("draft_model", value)
    if path is not None and path.is_file() and spec_type_of(header := read_header(path)):
        raise InputError(
            f"draft_model {path}: this draft ({header.architecture}) reads hidden states of its model, as "
            "`pyspac run` and `pyspac serve` let it; for Llama give a small model that could run by itself"
        )
    return path


def _text(name: str, value: Any, kinds: tuple[type, ...], what: str) -> str:
    parts = value if isinstance(value, list | tuple) else (value,)
    is_wrong = any(isinstance(part, bool) or not isinstance(part, kinds) or part == "" for part in parts)
    if not parts or is_wrong:
        raise InputError(f"{name} cannot be {value!r}: give {what}, or a list with one for each device")
    return ",".join(str(part) for part in parts)
