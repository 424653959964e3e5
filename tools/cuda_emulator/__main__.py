"""Runs the patched CUDA kernels and the split on a GPU that is emulated on the CPU; no GPU needed.

    python -m tools.cuda_emulator               build, then the tests that compute on a GPU
    python -m tools.cuda_emulator --arch 610    the kernels of another architecture (900 by default)
    python -m tools.cuda_emulator --memcheck    only the kernels, with AddressSanitizer
    python -m tools.cuda_emulator --no-tests    build only, and print how to use the result

In: the patched tree (python -m tools.patches prepare), a build (make build), and CUDA 13's headers. Out:
build/cuda-emulated/ARCH/libggml-cuda.so, a backend that ggml loads where GGML_BACKEND_PATH names it. What it
computes is what the kernels compute; how long it takes says nothing. README.md here says more.
Exit code 1 if a file or a test fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys

from tools.cuda_emulator.build import Build
from tools.cuda_emulator.suite import run_tests


def why_not() -> str | None:
    if shutil.which("nvcc") is None:
        return "no nvcc: install CUDA 13, or put its bin folder on PATH"
    if platform.machine() != "x86_64":
        return f"the emulator is for x86-64, this is {platform.machine()}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cuda_emulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", type=int, default=900, help="compute capability times 100 (default: 900)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations, and tests, at once")
    parser.add_argument("--memcheck", action="store_true", help="look for accesses beyond an allocation")
    parser.add_argument("--no-tests", action="store_true", help="build only")
    parser.add_argument(
        "--if-present", action="store_true", help="without CUDA's headers, say so and succeed"
    )
    options = parser.parse_args()

    if complaint := why_not():
        print(f"cuda_emulator: {complaint}", file=sys.stderr)
        return 0 if options.if_present else 2
    from pyspac import _native  # late: it needs the build

    build = Build(shutil.which("nvcc") or "", options.arch, options.memcheck, _native.lib_dir())
    try:
        build.run(options.jobs)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd[-4:])}\n{error.stderr[-4000:]}", file=sys.stderr)
        return 1
    if options.no_tests:
        print(f"GGML_BACKEND_PATH={build.library} pyspac run --device CUDA0 ...")
        return 0
    n_failed = run_tests(build.library, build.lib_dir.parent, options.memcheck, options.jobs)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
