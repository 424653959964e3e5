"""The patched tree of the build, redone only when pin or patches change."""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.patches.git import git
from tools.patches.pin import PatchError, Pin, log, read_pin
from tools.patches.pristine import locked, pristine_tree
from tools.patches.queue import Patch, read_patches, touched
from tools.patches.repository import copy_into


def prepare(build: Path, force: bool = False) -> Path:
    """The patched tree, redone only when pin or patches change; a file whose content stays keeps its time."""
    pin, patches, target = read_pin(), read_patches(), build / "llama.cpp"
    stamp = build / "llama.cpp.stamp"
    wanted = fingerprint(pin, patches)
    with locked(build / "llama.cpp.lock"):
        if not force and stamp.is_file() and stamp.read_text() == wanted and target.is_dir():
            return target
        stamp.unlink(missing_ok=True)
        tree = pristine_tree(build, pin)
        with tempfile.TemporaryDirectory(dir=build) as scratch:
            patched = patch_files(Path(scratch), tree, patches)
            n_written = sync_tree(tree, patched, touched(patches), target)
        stamp.write_text(wanted)
    log(f"llama.cpp {pin.tag} with {len(patches)} patches in {target} ({n_written} files written)")
    return target


def fingerprint(pin: Pin, patches: Sequence[Patch]) -> str:
    """sha256 over pin and patches; asking "does it reverse-apply?" misreports patches that share lines."""
    parts = [pin.commit, pin.sdist_sha256, *(f"{patch.name}\0{patch.text}" for patch in patches)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def patch_files(scratch: Path, tree: Path, patches: Sequence[Patch]) -> Path:
    """The files that patches touch, patched: by plain `git apply`, hidden from repositories around it."""
    copy_into(tree, scratch, touched(patches))
    for patch in patches:
        try:
            git(scratch, "apply", "--whitespace=nowarn", "-", stdin=patch.text)
        except PatchError as error:
            raise PatchError(
                f"patches/{patch.name} does not apply to llama.cpp {read_pin().tag}.\n{error}\n"
                "Either the pin moved or an earlier patch changed the same lines: see docs/patches.md."
            ) from None
    return scratch


def sync_tree(tree: Path, patched: Path, changed: Sequence[str], target: Path) -> int:
    """Make `target` equal to `tree` with `changed` taken from `patched`; return how many files it wrote."""
    wanted = {path: tree / path for path in list_files(tree)}
    for path in changed:
        wanted.pop(path, None)
        if (patched / path).is_file():
            wanted[path] = patched / path
    for path in set(list_files(target)) - set(wanted):
        (target / path).unlink()
    return sum(copy_if_different(source, target / path) for path, source in wanted.items())


def list_files(tree: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(tree):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        yield from (os.path.relpath(f"{folder}/{name}", tree) for name in files if name != ".git")


def copy_if_different(source: Path, target: Path) -> bool:
    # a written file gets the present time, not its source's: make and ninja rebuild only what is newer
    if target.is_file() and filecmp.cmp(source, target, shallow=False):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    shutil.copymode(source, target)
    return True
