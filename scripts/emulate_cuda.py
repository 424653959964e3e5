#!/usr/bin/env python3
"""Runs the patched CUDA kernels and the split on a GPU that is emulated on the CPU; no GPU needed.

    emulate_cuda.py               build, then the tests that compute on a GPU
    emulate_cuda.py --arch 610    the kernels of another architecture (900 by default)
    emulate_cuda.py --memcheck    the kernels only, with AddressSanitizer: accesses beyond an allocation
    emulate_cuda.py --no-tests    build only, and print how to use the result

In: the patched tree (scripts/patches.py prepare), a build (make build), and CUDA 13's headers. Out:
build/cuda-emulated/ARCH/libggml-cuda.so, a backend that ggml loads where GGML_BACKEND_PATH names it. What it
computes is what the kernels compute; how long it takes says nothing. tests/cuda-emulator/README.md says more.
Exit code 1 if a file or a test fails.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_cuda import ROOT, TREE, cublas_include, toolkit_of

EMULATOR = ROOT / "tests" / "cuda-emulator"
sys.path.insert(0, str(EMULATOR))

from translate import translate  # noqa: E402

GGML = TREE / "ggml"
CUDA = GGML / "src" / "ggml-cuda"
# what MoE transformers need; the rest becomes functions that end the program and say their name
SOURCES = """
    add-id argmax argsort binbcast clamp concat convert cpy cumsum diag fill fwht gated_delta_net getrows
    ggml-cuda mean mmf mmid mmq mmvf mmvq moe-weighted-reduction norm pad quantize rope scale set-rows
    softcap softmax solve_tri ssm-conv sum sumrows topk-moe tri unary template-instances/mmf-instance-*
    template-instances/mmq-instance-iq4_xs template-instances/mmq-instance-mxfp4
    template-instances/mmq-instance-q[4568]_[01k]
"""
FAR_VRAM_MIB = "10240"  # for experts that lie 8 GiB apart; what is not touched takes no memory
DELAY_US = "100"  # of every job of a stream, at most: what is not ordered shall overtake
FLAGS = """
    -std=c++17 -O1 -fPIC -w -march=native -DGGML_CUDA_NO_VMM -DGGML_CUDA_USE_GRAPHS
    -DGGML_BACKEND_DL -DGGML_BACKEND_SHARED -DGGML_BACKEND_BUILD
"""
MEMCHECK = ("-fsanitize=address", "--param=asan-stack=0")  # fibers have stacks that it does not know


def translated_sources(folder: Path) -> list[Path]:
    """Translate all of ggml-cuda into `folder`; what did not change keeps its time. The files to compile."""
    for source in [*CUDA.rglob("*.cu"), *CUDA.rglob("*.cuh"), *CUDA.rglob("*.h")]:
        text = translate(source.read_text(encoding="utf-8"))
        target = folder / source.relative_to(CUDA)
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    return sorted(path for name in SOURCES.split() for path in folder.glob(f"{name}.cu"))


class Build:
    """Objects that are older than what they are made of are made again."""

    def __init__(self, nvcc: str, arch: int, memcheck: bool, lib_dir: Path) -> None:
        self.folder = ROOT / "build" / "cuda-emulated" / f"{arch}{'-memcheck' if memcheck else ''}"
        self.sources = ROOT / "build" / "cuda-emulated" / "src" / "ggml-cuda"
        self.library = self.folder / "libggml-cuda.so"
        self.lib_dir = lib_dir
        self.compiler = [
            *os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", "").split(),
            os.environ.get("CXX", "g++"),
        ]
        cuda = toolkit_of(Path(nvcc)) / "include"
        includes = [self.sources.parent, EMULATOR, GGML / "src", GGML / "include", cuda, cublas_include(nvcc)]
        self.flags = [*FLAGS.split(), f"-DEMULATED_ARCH={arch}", *(f"-I{folder}" for folder in includes)]
        self.flags += MEMCHECK if memcheck else ()

    def run(self, jobs: int) -> None:
        """Raises CalledProcessError with the compiler's complaint."""
        (self.folder / "objects").mkdir(parents=True, exist_ok=True)
        files = [*sorted(EMULATOR.glob("*.cpp")), *translated_sources(self.sources)]
        headers = [*EMULATOR.glob("*.h"), *self.sources.glob("*.cuh"), *self.sources.glob("vendors/*.h")]
        newest = max(path.stat().st_mtime for path in headers)
        start = time.monotonic()
        with ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(lambda file: self.compile(file, newest), files))
        self.link([*objects, self.compile_absent(objects)])
        print(f"built {self.library.relative_to(ROOT)} in {time.monotonic() - start:.0f} s", flush=True)

    def compile(self, source: Path, newest_header: float) -> Path:
        target = self.folder / "objects" / f"{source.stem}.o"
        if target.is_file() and target.stat().st_mtime > max(newest_header, source.stat().st_mtime):
            return target
        before = ["-include", "emulator.h", "-x", "c++"] if source.suffix == ".cu" else []
        call([*self.compiler, *self.flags, *before, "-c", str(source), "-o", str(target)])
        print(f"  {source.stem}", flush=True)
        return target

    def compile_absent(self, objects: list[Path]) -> Path:
        """Functions for what SOURCES leaves out: "is it supported?" gets a no, others end the program."""
        source = self.folder / "absent.c"
        lines = ["#include <stdio.h>", "#include <stdlib.h>"]
        for name in undefined_names(objects):
            message = rf'fputs("cuda-emulator: {name} is not compiled\n", stderr); abort();'
            body = "return 0;" if "_supported" in name else message
            lines.append(f"int {name}(void) {{ {body} }}")
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        call(["cc", "-c", "-fPIC", str(source), "-o", str(source.with_suffix(".o"))])
        return source.with_suffix(".o")

    def link(self, objects: list[Path]) -> None:
        libraries = [f"-L{self.lib_dir}", "-lggml-base", f"-Wl,-rpath,{self.lib_dir}", "-lpthread"]
        call([self.compiler[-1], "-shared", "-o", str(self.library), *map(str, objects), *libraries])


def undefined_names(objects: list[Path]) -> list[str]:
    """Names of ggml-cuda's C++ functions, of CUDA's and of cuBLAS's that no object has."""

    def names(kind: str) -> set[str]:
        command = ["nm", f"--{kind}-only", "--format=just-symbols", *map(str, objects)]
        return set(call(command).split())

    wanted = re.compile(r"_Z.*_cuda|cuda[A-Z]|cublas[A-Z]")
    return sorted(name for name in names("undefined") - names("defined") if wanted.match(name))


def call(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_tests(library: Path, build_dir: Path, memcheck: bool, jobs: int) -> int:
    """How many failed. The engine's test computes on every device, `pytest -m gpu` on the first."""
    environment = os.environ | {"GGML_BACKEND_PATH": str(library), "CUDA_EMULATOR_DELAY_US": DELAY_US}
    programs = build_dir / "tests"
    backend_ops = [str(programs / "test-backend-ops"), "test", "-b", "CUDA0", "-p", "skip=1"]
    tests = {
        "test-negative-ids": [str(programs / "test-negative-ids"), "CUDA0"],
        "test-backend-ops": backend_ops,
    }
    if memcheck:
        environment |= {"LD_PRELOAD": sanitizer_library(), "ASAN_OPTIONS": "detect_leaks=0"}
    else:
        tests["test-far-experts"] = [str(programs / "test-far-experts"), "CUDA0"]
        tests["pytest -m gpu"] = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")]

    def run_test(name: str) -> bool:
        start = time.monotonic()
        memory = {"CUDA_EMULATOR_VRAM_MIB": FAR_VRAM_MIB} if name == "test-far-experts" else {}
        done = subprocess.run(tests[name], env=environment | memory, capture_output=True, text=True)
        result = "FAILED" if done.returncode else "ok"
        print(f"  {result:6} {name}, {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode:
            print((done.stdout + done.stderr)[-4000:], file=sys.stderr)
        return done.returncode == 0

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run_test, tests)).count(False)


def sanitizer_library() -> str:
    return call([os.environ.get("CXX", "g++"), "-print-file-name=libasan.so"]).strip()


def why_not() -> str | None:
    if shutil.which("nvcc") is None:
        return "no nvcc: install CUDA 13, or put its bin folder on PATH"
    if platform.machine() != "x86_64":
        return f"the emulator is for x86-64, this is {platform.machine()}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
        print(f"emulate_cuda.py: {complaint}", file=sys.stderr)
        return 0 if options.if_present else 2
    from pyspac import _native

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
