"""The unpatched tree: the submodule, or the one inside the source distribution of the Python bindings."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tools.patches.git import git
from tools.patches.pin import ROOT, PatchError, Pin, log


def pristine_tree(build: Path, pin: Pin) -> Path:
    """The unpatched tree: the submodule, or the one inside the source distribution of the Python bindings."""
    submodule = ROOT / "llama.cpp"
    if (submodule / "CMakeLists.txt").is_file():
        check_submodule(submodule, pin)
        return submodule
    return extract_sdist(find_sdist(build, pin), build / "sdist", pin)


def check_submodule(submodule: Path, pin: Pin) -> None:
    if not (submodule / ".git").exists():
        return  # an archive of a checkout: nothing to compare with
    commit = git(submodule, "rev-parse", "HEAD").strip()
    if commit != pin.commit:
        raise PatchError(
            f"llama.cpp/ is at {commit}, but cmake/pin.json names {pin.commit}.\n"
            "Run `git submodule update llama.cpp`, or move the pin (docs/patches.md)."
        )


def find_sdist(build: Path, pin: Pin) -> Path:
    """The checked archive; PYSPAC_SDIST names one that is already on this machine."""
    given = os.environ.get("PYSPAC_SDIST")
    archive = Path(given) if given else build / "sdist" / f"{pin.sdist_stem}.tar.gz"
    if not archive.is_file() and not given:
        download_sdist(archive.parent, pin)
    if not archive.is_file():
        raise PatchError(f"{archive} is missing. Unset PYSPAC_SDIST, or let it name {pin.sdist_stem}.tar.gz.")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != pin.sdist_sha256:
        raise PatchError(
            f"{archive} has sha256 {digest}, expected {pin.sdist_sha256}. Delete it and run again."
        )
    return archive


def download_sdist(folder: Path, pin: Pin) -> None:
    """Fetch the archive with pip, which also reads its metadata (a few seconds; it compiles nothing)."""
    folder.mkdir(parents=True, exist_ok=True)
    log(f"fetching the source distribution of {pin.requirement}")
    command = [*find_pip(folder), "download", "--quiet", "--no-deps", "--no-binary", pin.sdist_name]
    command += ["--dest", str(folder), pin.requirement]
    env = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    if subprocess.run(command, env=env, stdout=sys.stderr).returncode != 0:
        raise PatchError(
            f"could not fetch {pin.requirement}. llama.cpp/ is empty, so the tree has to come from there:\n"
            "check the connection to the package index, run `git submodule update --init llama.cpp`,\n"
            f"or set PYSPAC_SDIST to a copy of {pin.sdist_stem}.tar.gz."
        )


def find_pip(folder: Path) -> list[str]:
    """A pip that runs. Inside an isolated build sys.path hides it; isolated mode (-I) shows it again."""
    for command in ([sys.executable, "-m", "pip"], [sys.executable, "-I", "-m", "pip"]):
        if subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    venv = folder / "venv"
    if not (venv / "bin" / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, stdout=sys.stderr)
    return [str(venv / "bin" / "python"), "-m", "pip"]


def extract_sdist(archive: Path, folder: Path, pin: Pin) -> Path:
    """Unpack llama.cpp only. Its stray `.git` is a file that points nowhere: git would trip over it."""
    tree = folder / pin.sdist_stem / pin.sdist_tree
    stamp = folder / "extracted.sha256"
    with locked(folder / "lock"):
        if stamp.is_file() and stamp.read_text() == pin.sdist_sha256 and (tree / "CMakeLists.txt").is_file():
            return tree
        shutil.rmtree(folder / pin.sdist_stem, ignore_errors=True)
        prefix = f"{pin.sdist_stem}/{pin.sdist_tree}/"
        with tarfile.open(archive) as tar:
            members = (m for m in tar if m.name.startswith(prefix) and m.name != prefix + ".git")
            extract_members(tar, members, folder)
        stamp.write_text(pin.sdist_sha256)
    return tree


def extract_members(tar: tarfile.TarFile, members: Iterator[tarfile.TarInfo], folder: Path) -> None:
    # the filter argument came with security updates: older Pythons do not know it
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    for member in members:
        tar.extract(member, folder, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time: several presets may configure at once, and checks may run beside them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
