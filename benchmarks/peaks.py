"""What the processor's cores do at most: f32, int8 and, with AMX, bf16 operations per second (`peaks.c`)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KINDS = ("f32", "int8", "bf16")
N_TRIES = 3


def build(folder: Path) -> ctypes.CDLL:
    """`peaks.c`, compiled for this processor."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        sys.exit("no C compiler: install one (Debian, Ubuntu: apt install build-essential), or set CC")
    library = folder / "peaks.so"
    source = Path(__file__).with_name("peaks.c")
    command = [compiler, "-O2", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return ctypes.CDLL(str(library))


def measure_peaks(n_threads: int) -> dict[str, float]:
    """{kind: 1e9 operations per second of all threads}, the best of several tries; 0: it has none."""
    with tempfile.TemporaryDirectory(prefix="pyspac-peaks-") as folder:
        library = build(Path(folder))
        return {kind: max(rate_of(library, kind, n_threads) for _ in range(N_TRIES)) for kind in KINDS}


def rate_of(library: ctypes.CDLL, kind: str, n_threads: int) -> float:
    function = getattr(library, f"peak_{kind}")
    function.restype = ctypes.c_double
    with ThreadPoolExecutor(n_threads) as pool:  # ctypes lets go of the interpreter's lock
        rates = list(pool.map(lambda _: function(), range(n_threads)))
    return float(round(sum(rates) / 1e9, 1))
