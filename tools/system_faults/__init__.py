"""Faults of the system for a program that we start: reads that fail, come short or are slow; no threads.

A small library (shim.c) stands before the C library's pread and pthread_create. A file that both sides map
says what happens now, so faults come and go while the program runs.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

COMPILER: Final = "cc"
VARIABLE: Final = "PYSPAC_FAULTS"
_FAULTS: Final = ("thread_every", "read_every", "short_every", "slow_every", "lie_every")
# as the shim's enum
_WORDS: Final = (*_FAULTS, "slow_us", "n_threads", "n_reads", "n_no_threads", "n_bad_reads")


class SystemFaults:
    """The words of one program's faults; `SystemFaults(path)` in any process that may set them."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._words = mmap.mmap(file.fileno(), 4 * len(_WORDS))

    def get(self, name: str) -> int:
        return int(struct.unpack_from("=I", self._words, 4 * _WORDS.index(name))[0])

    def set(self, **values: int) -> None:
        """`read_every=3`: every third read fails; 0: none does."""
        for name, value in values.items():
            struct.pack_into("=I", self._words, 4 * _WORDS.index(name), value)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No faults meanwhile."""
        before = {name: self.get(name) for name in _FAULTS}
        self.set(**dict.fromkeys(_FAULTS, 0))
        try:
            yield
        finally:
            self.set(**before)


def has_compiler() -> bool:
    return shutil.which(COMPILER) is not None


def prepare(folder: Path) -> dict[str, str]:
    """Compile the library into `folder`; the environment of a program with faults, none at first."""
    library, words = folder / "faults.so", folder / "faults.words"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    words.write_bytes(bytes(4 * len(_WORDS)))
    others = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{others}" if others else str(library), VARIABLE: str(words)}
