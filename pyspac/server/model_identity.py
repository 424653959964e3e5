"""Which model a file is: a path in, a hash of the content out; and the folder of files that bear it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final

HEADER_BYTES: Final = 8 << 20  # the largest vocabularies take 6 MB
N_SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096


def cache_folder() -> Path:
    """$PYSPAC_CACHE_DIR, else pyspac in $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("PYSPAC_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pyspac"


def model_hash(path: Path) -> str:
    """A fast hash of a model's content: of each file its size, its beginning and 64 samples of 4 KiB.

    The beginning holds the header: metadata, names, types and shapes. Reading 20 GB takes longer than a warm
    start can save. Two models that differ in few weights only may collide; the worst that follows is a start
    with the other's utilities. Raises OSError.
    """
    digest = hashlib.sha256()
    for part in model_parts(path):
        _add(digest, part)
    return digest.hexdigest()


def model_parts(path: Path) -> list[Path]:
    """The files of a split model, or the one file."""
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{i:05d}-of-{match[2]}.gguf") for i in range(1, int(match[2]) + 1)]


def _add(digest: Any, path: Path) -> None:
    n_bytes = path.stat().st_size
    digest.update(str(n_bytes).encode())
    with path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
        for i in range(N_SAMPLES):
            file.seek(i * max(0, n_bytes - SAMPLE_BYTES) // (N_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
