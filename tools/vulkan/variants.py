"""Compiles the patched shader that distributions' compilers do not know, for integer dot products."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tools.vulkan.glslang import PACKAGES, is_here

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = "mul_mat_vecq.comp"  # of those that patches/upstream/0008 changes; glslc compiles the others
# spirv-val's complaint about what it is too old for
UNKNOWN: Final = "Invalid capability operand"


def compile_variants(shaders: Path, folder: Path) -> int:
    """How many failed; one line says what was compiled, or why nothing was."""
    if not is_here():
        print(f"  none   variants of {SOURCE}: no newer compiler (pip install {' '.join(PACKAGES)})")
        return 0
    start = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    glslc = folder / "glslc"
    glslc.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tools.vulkan.glslang "$@"\n')
    glslc.chmod(0o755)
    paths = {
        "--glslc": glslc,
        "--source": shaders / SOURCE,
        "--output-dir": folder,
        "--target-hpp": folder / "all.hpp",
        "--target-cpp": folder / f"{SOURCE}.cpp",
    }
    command = [_build_generator(shaders, folder), *(str(part) for pair in paths.items() for part in pair)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    variants = sorted(folder.glob("*.spv"))
    n_failed = bool(done.returncode or not variants) + sum(not _is_valid(path) for path in variants)
    verdict = "FAILED" if n_failed else "ok"
    print(f"  {verdict:6} {len(variants)} variants of {SOURCE}, {time.monotonic() - start:.0f} s", flush=True)
    return n_failed


def _build_generator(shaders: Path, folder: Path) -> str:
    """ggml's, as it is built where the compiler knows all extensions."""
    source = shaders / "vulkan-shaders-gen.cpp"
    known = sorted(set(re.findall(r"GGML_VULKAN_\w+_GLSLC_SUPPORT", source.read_text())))
    generator = folder / "vulkan-shaders-gen"
    flags = ["-std=c++17", "-O1", *(f"-D{name}" for name in known), "-pthread"]
    subprocess.run(["c++", *flags, str(source), "-o", str(generator)], check=True)
    return str(generator)


def _is_valid(path: Path) -> bool:
    validator = Path(sys.executable).with_name("spirv-val")
    if not validator.exists():
        return True
    done = subprocess.run(
        [str(validator), "--target-env", "vulkan1.3", str(path)], capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    if done.returncode and UNKNOWN not in said:
        print(f"{path.name}: {said}", file=sys.stderr)
        return False
    return True
