"""Builds the emulated backend: the patched CUDA sources, translated, and the emulator in; a library out."""

from __future__ import annotations

import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.cuda_emulator.toolkit import ROOT, TREE, cublas_include, toolkit_of
from tools.cuda_emulator.translate import translate

EMULATOR = Path(__file__).resolve().parent
GGML = TREE / "ggml"
CUDA = GGML / "src" / "ggml-cuda"
# what MoE transformers need; the rest becomes functions that end the program and say their name
SOURCES = """
    add-id argmax argsort binbcast clamp concat convert cpy cumsum custom diag fill fwht gated_delta_net
    getrows ggml-cuda mean mmf mmid mmq mmvf mmvq moe-weighted-reduction norm pad quantize rope scale set-rows
    softcap softmax solve_tri ssm-conv sum sumrows topk-moe tri unary template-instances/mmf-instance-*
    template-instances/mmq-instance-iq4_xs template-instances/mmq-instance-mxfp4
    template-instances/mmq-instance-q[4568]_[01k]
"""
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
