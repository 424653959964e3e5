"""What `--json` names: a file that is written whole or not at all, or stdout."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from pyspac.errors import PyspacError

STDOUT: Final = "-"
_PROBE_BYTES: Final = 1 << 16


def write_json(target: str, value: dict[str, Any]) -> None:
    """Write `value` to the file `target`, whole or not at all, or to stdout for "-". Raises PyspacError."""
    text = json_text(value)
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()  # errors there are the command's: see reports_errors
        return
    write_result(Path(target), text.encode(), "result")


def json_text(value: dict[str, Any]) -> str:
    """One object, with null for what is no number."""
    return json.dumps(_without_nan(value), indent=2) + "\n"


def can_write(path: Path) -> bool:
    """Whether `write_whole` would succeed with a few KiB now; devices and pipes show it only later."""
    try:
        if path.exists() and not path.is_file():
            return os.access(path, os.W_OK)
        with tempfile.TemporaryFile(dir=path.absolute().parent) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError:
        return False
    return True


def write_result(path: Path, data: bytes, what: str) -> None:
    """`write_whole` of `what`. Raises PyspacError."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise PyspacError(
            f"{path}: the {what} was not written ({error.strerror}); make room there, or give another file"
        ) from error


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file, or leave it as it is; `mode`: who may read it, less the umask. Raises OSError."""
    if path.exists() and not path.is_file():  # a device or a pipe: nothing to replace
        path.write_bytes(data)
        return
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(temporary).chmod(mode & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; null says the same."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list) else value
