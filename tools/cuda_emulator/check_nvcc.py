"""Compiles the CUDA sources that the patches touch; no GPU needed.

    python -m tools.cuda_emulator.check_nvcc                 for sm_86 and sm_90
    python -m tools.cuda_emulator.check_nvcc --arch sm_120   for another

In: the patched tree (tools.patches prepare) and nvcc of CUDA 13. The headers of cuBLAS come from CUDA, or
from the package nvidia-cublas, whose headers are kept in build/cuda-headers. Exit code 1 if a file fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.cuda_emulator.toolkit import ROOT, TREE, cublas_include

ARCHITECTURES = ("sm_86", "sm_90")
# as ggml's own build, but for optimisation: what compiles is the question
FLAGS = (
    "-std=c++17",
    "-O1",
    "-Xptxas",
    "-O1",
    "-DGGML_CUDA_USE_GRAPHS",
    "--use_fast_math",
    "-extended-lambda",
)


def touched_sources() -> list[Path]:
    """The .cu files that patches change."""
    names: set[str] = set()
    for patch in sorted((ROOT / "patches").glob("*/*.patch")):
        for line in patch.read_text(encoding="utf-8").splitlines():
            if line.startswith("+++ b/") and line.endswith(".cu"):
                names.add(line.removeprefix("+++ b/"))
    return [TREE / name for name in sorted(names)]


def compile_one(nvcc: str, include: Path, source: Path, architectures: list[str]) -> tuple[Path, str | None]:
    """(source, the compiler's complaint or None)."""
    targets = [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in architectures]
    ggml = TREE / "ggml"
    folders = [f"-I{folder}" for folder in (source.parent, ggml / "src", ggml / "include", include)]
    command = [nvcc, *FLAGS, *targets, *folders, "-c", "-o", os.devnull, str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    return source, None if result.returncode == 0 else result.stdout + result.stderr


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cuda_emulator.check_nvcc",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", action="append", help="a GPU architecture, such as sm_90; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at once")
    parser.add_argument("--if-present", action="store_true", help="without nvcc, say so and succeed")
    options = parser.parse_args()

    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("check_nvcc: no nvcc: install CUDA 13, or put its bin folder on PATH", file=sys.stderr)
        return 0 if options.if_present else 2
    include = cublas_include(nvcc)
    sources = touched_sources()
    architectures = options.arch or list(ARCHITECTURES)
    print(f"{len(sources)} CUDA sources for {', '.join(architectures)}", flush=True)
    n_failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for source, complaint in pool.map(
            lambda source: compile_one(nvcc, include, source, architectures), sources
        ):
            print(f"  {'FAILED' if complaint else 'ok':6} {source.name}", flush=True)
            if complaint:
                print(complaint, file=sys.stderr)
                n_failed += 1
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
