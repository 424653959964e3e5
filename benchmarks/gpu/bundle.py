#!/usr/bin/env python3
"""Collects what a CUDA machine without a network needs to build, test and measure pyspac, in one folder.

    bundle.py                      build/gpu-bundle, for Python 3.12 on x86-64
    bundle.py --python 3.11        for another Python
    bundle.py --no-cmake           without cmake and ninja, 30 MB less, where the machine has them

In it: sources (our own, and llama.cpp patched and cut down to what the build reads), wheels, Python's
headers, and run.py. There: python3 gpu-bundle/run.py --help
"""

from __future__ import annotations

import argparse
import email
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_MIB = 64.0
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
BUILD_TOOLS = ("cmake>=3.24", "ninja")  # 3.24: CMAKE_CUDA_ARCHITECTURES=native

# what the benchmark's build reads of our own files, and of llama.cpp's
OUR_FILES = ("CMakeLists.txt", "CMakePresets.json", "LICENSE", "pyproject.toml")
OUR_FOLDERS = ("cmake", "engine", "patches", "pyspac", "scripts", "tools/patches", "benchmarks")
LLAMA_FILES = ("CMakeLists.txt", "LICENSE", "ggml/CMakeLists.txt", "vendor/CMakeLists.txt")
LLAMA_FOLDERS = (
    "cmake",
    "include",
    "licenses",
    "src",
    "ggml/cmake",
    "ggml/include",
    "ggml/src/ggml-cpu",
    "ggml/src/ggml-cuda",
    "ggml/src/ggml-rpc",
    "vendor/hash",
    "vendor/miniaudio",
    "vendor/nlohmann",
    "vendor/sheredom",
    "vendor/stb",
)
LLAMA_FLAT = "ggml/src"  # of this folder only the files
IGNORED_SUFFIXES = (".gguf", ".pyc", ".so", ".npz", ".md", ".svg")
IGNORED_FILES = ("miniaudio.h", "stb_image.h")  # large, and only for programs that are not built
IGNORED_FOLDERS = ("__pycache__", "results", "models")


class BundleError(Exception):
    """What is missing, and what to do."""


# ---- sources -------------------------------------------------------------------------------------


def files_of(root: Path, files: tuple[str, ...], folders: tuple[str, ...]) -> Iterator[Path]:
    for name in files:
        yield root / name
    for folder in folders:
        if not (root / folder).is_dir():
            raise BundleError(f"{root / folder} is missing")
        yield from sorted(path for path in (root / folder).rglob("*") if is_wanted(path, root))


def is_wanted(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    return (
        path.is_file()
        and path.suffix not in IGNORED_SUFFIXES
        and path.name not in IGNORED_FILES
        and not any(part in IGNORED_FOLDERS and parts[:2] != ("src", "models") for part in parts[:-1])
    )


def llama_files(tree: Path) -> Iterator[Path]:
    yield from files_of(tree, LLAMA_FILES, LLAMA_FOLDERS)
    yield from sorted(path for path in (tree / LLAMA_FLAT).iterdir() if path.is_file())


def write_sources(path: Path, tree: Path) -> int:
    """The patched llama.cpp lies where `tools.patches` would make it, so that nothing is left to patch."""
    members = {f"build/llama.cpp/{file.relative_to(tree)}": file for file in llama_files(tree)}
    members["build/llama.cpp.stamp"] = ROOT / "build" / "llama.cpp.stamp"
    members |= {str(file.relative_to(ROOT)): file for file in files_of(ROOT, OUR_FILES, OUR_FOLDERS)}
    with (
        path.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, file in sorted(members.items()):
            data = file.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o755 if os.access(file, os.X_OK) else 0o644
            tar.addfile(info, io.BytesIO(data))
    return len(members)


def patched_tree() -> Path:
    """build/llama.cpp, made if it is missing or old."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.patches", "prepare"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise BundleError("llama.cpp could not be prepared: see above")
    return Path(done.stdout.strip())


# ---- wheels --------------------------------------------------------------------------------------


def collect_wheels(folder: Path, python: str, with_cmake: bool) -> None:
    """pyspac's dependencies for the other machine; llama-cpp-python without its own llama.cpp."""
    folder.mkdir(parents=True)
    bindings = bindings_wheel(folder)
    requirements = [r for r in our_requirements() if not r.startswith("llama-cpp-python")]
    requirements += needs_of(bindings) + (list(BUILD_TOOLS) if with_cmake else [])
    command = [
        *pip(),
        "download",
        "-qq",
        "--dest",
        str(folder),
        "--only-binary=:all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
        *(f"--platform={platform}" for platform in PLATFORMS),
        *requirements,
    ]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise BundleError(
            f"pip could not fetch wheels for Python {python}; is there a connection to the package index?"
        )


def bindings_wheel(folder: Path) -> Path:
    """Pure Python, so it fits every Python; built from the archive that the build uses as well."""
    found = subprocess.run(
        [sys.executable, "-m", "tools.patches", "sdist"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    command = [*pip(), "wheel", "-qq", "--no-deps", "--wheel-dir", str(folder), found.stdout.strip()]
    environment = os.environ | {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    if subprocess.run(command, env=environment, stdout=sys.stderr).returncode != 0:
        raise BundleError("the wheel of the Python bindings could not be built: see above")
    return next(folder.glob("llama_cpp_python-*.whl"))


def pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def our_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def needs_of(wheel: Path) -> list[str]:
    """Requires-Dist of a wheel, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    return [str(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in str(line)]


# ---- the folder ----------------------------------------------------------------------------------


def copy_python_headers(target: Path) -> bool:
    """For machines whose Python has none; the engine's module keeps to the limited interface of Python 3."""
    source = Path(sysconfig.get_paths()["include"])
    if not (source / "Python.h").is_file():
        return False
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("internal"))
    return True


def commit() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def make_bundle(out: Path, python: str, with_cmake: bool, with_wheels: bool = True) -> dict[str, object]:
    """Write the folder again; return its description. Wheels that are there already are kept."""
    tree = patched_tree()
    out.mkdir(parents=True, exist_ok=True)
    kind = f"{python} {'with' if with_cmake else 'without'} cmake {' '.join(our_requirements())}"
    if with_wheels and old_kind(out) != kind:
        shutil.rmtree(out / "wheels", ignore_errors=True)
        collect_wheels(out / "wheels", python, with_cmake)
    shutil.rmtree(out / "python-include", ignore_errors=True)
    has_headers = copy_python_headers(out / "python-include")
    n_files = write_sources(out / "sources.tar.gz", tree)
    shutil.copyfile(HERE / "launch.py", out / "run.py")
    description = {
        "commit": commit(),
        "wheels": kind,
        "n_source_files": n_files,
        "has_python_headers": has_headers,
        "size_mib": round(size_of(out) / 2**20, 1),
    }
    (out / "bundle.json").write_text(json.dumps(description, indent=2) + "\n")
    return description


def old_kind(out: Path) -> str | None:
    path = out / "bundle.json"
    try:
        return str(json.loads(path.read_text())["wheels"]) if any((out / "wheels").glob("*.whl")) else None
    except (OSError, KeyError, ValueError):
        return None


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu-bundle", help="default: build/gpu-bundle"
    )
    parser.add_argument(
        "--python", default="3.12", metavar="X.Y", help="Python of the other machine (default: 3.12)"
    )
    parser.add_argument("--no-cmake", action="store_true", help="without cmake and ninja")
    parser.add_argument(
        "--limit-mib", type=float, default=LIMIT_MIB, help=f"largest size (default: {LIMIT_MIB:.0f})"
    )
    args = parser.parse_args(argv)
    try:
        description = make_bundle(args.out, args.python, not args.no_cmake)
    except BundleError as error:
        print(f"bundle.py: {error}", file=sys.stderr)
        return 1
    size = float(str(description["size_mib"]))
    print(
        f"{args.out}: {size:.1f} MiB, {description['n_source_files']} source files, "
        f"commit {description['commit']}"
    )
    if size > args.limit_mib:
        print(f"bundle.py: more than {args.limit_mib:.0f} MiB: try --no-cmake", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
