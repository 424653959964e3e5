"""Where CUDA's headers and the patched CUDA sources are."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))

from builder import toolkit_of as toolkit_of  # noqa: E402

TREE: Final = ROOT / "build" / "llama.cpp"
HEADERS: Final = ROOT / "build" / "cuda-headers"
CUBLAS: Final = "nvidia-cublas==13.0.2.14"


def cublas_include(nvcc: str) -> Path:
    """A folder with cublas_v2.h; fetched once where CUDA has none."""
    beside = toolkit_of(Path(nvcc)) / "include"
    if (beside / "cublas_v2.h").is_file():
        return beside
    found = list(HEADERS.rglob("cublas_v2.h"))
    return found[0].parent if found else fetch_cublas_headers()


def fetch_cublas_headers() -> Path:
    print(f"fetching the headers of {CUBLAS} (about 400 MB, once)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, CUBLAS]
        subprocess.run(download, check=True)
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            headers = [name for name in archive.namelist() if "/include/" in name]
            archive.extractall(HEADERS, headers)
    return next(HEADERS.rglob("cublas_v2.h")).parent
