"""Builds ggml's Vulkan backend and runs the tests that compute on it, on lavapipe; no GPU needed.

    python -m tools.vulkan               build (two minutes on two cores), then the tests
    python -m tools.vulkan --no-tests    build only, and print how to use the result

In: the patched tree (python -m tools.patches prepare), a build (make build) with its engine-tests, and the
packages that `lavapipe.py` names. Out: build/vulkan-alone/libggml-vulkan.so, a backend that ggml loads where
GGML_BACKEND_PATH names it. Exit code 1 if something fails, 2 if a package is missing.

Lavapipe is a driver, and the shaders are the real ones; what it shows holds only for these shaders (32-bit
floats, subgroups of 8), and reads out of bounds give zeros on it. The patched shaders that only other devices
take are compiled, where there is a compiler that knows them (glslang.py), and not run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.vulkan.lavapipe import environment, why_not
from tools.vulkan.suite import run_tests
from tools.vulkan.variants import compile_variants

ROOT: Final = Path(__file__).resolve().parents[2]
TREE: Final = ROOT / "build" / "llama.cpp"
FOLDER: Final = ROOT / "build" / "vulkan-alone"
LIBRARY: Final = FOLDER / "libggml-vulkan.so"
SHADERS: Final = TREE / "ggml" / "src" / "ggml-vulkan" / "vulkan-shaders"


def build(lib_dir: Path, jobs: int) -> None:
    """Raises CalledProcessError; the compiler's complaint is on the terminal."""
    source = Path(__file__).resolve().parent
    options = [f"-DTREE={TREE}", f"-DLIBS={lib_dir}", "-DCMAKE_BUILD_TYPE=Release"]
    configure = ["cmake", "--log-level=NOTICE", "-S", str(source), "-B", str(FOLDER), *options]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(FOLDER), "-j", str(jobs)], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.vulkan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at once")
    parser.add_argument("--no-tests", action="store_true", help="build only")
    parser.add_argument("--if-present", action="store_true", help="without the packages, say so and succeed")
    options = parser.parse_args()

    if complaint := why_not():
        print(f"vulkan: nothing was tested: {complaint}", file=sys.stderr)
        return 0 if options.if_present else 2
    from pyspac import _native  # late: it needs the build

    try:
        build(_native.lib_dir(), options.jobs)
    except subprocess.CalledProcessError as error:
        print(f"vulkan: the backend was not built: {' '.join(error.cmd)}", file=sys.stderr)
        return 1
    variables = environment(LIBRARY)
    if options.no_tests:
        print(*(f"{name}={value}" for name, value in variables.items()), "pyspac run --device Vulkan0 ...")
        return 0
    n_failed = compile_variants(SHADERS, FOLDER / "variants")
    n_failed += run_tests(_native.lib_dir().parent, ROOT, variables)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
