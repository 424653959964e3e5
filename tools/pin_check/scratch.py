"""A copy of the tree that is asked about, and our patches applied to it one after another."""

from __future__ import annotations

import re
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.patches.git import run_git
from tools.patches.queue import Patch

# what is compiled, and what patches touch; the rest of llama.cpp is large and of no use here
FOLDERS: Final = ("common", "ggml", "include", "src", "tests", "tools", "vendor", "app", "cmake")
_REJECTED: Final = re.compile(r"^Rejected hunk #(\d+)\.", re.MULTILINE)
_MOVED: Final = re.compile(r"^Hunk #\d+ succeeded at \d+ \(offset (-?\d+) lines?\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reject:
    """A place where a patch does not apply; `hunk` counts from 1 in its file, 0: the file is not there."""

    path: str
    hunk: int
    text: str  # git's own words, or the hunk's first line


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one patch."""

    patch: str
    n_moved: int  # hunks that were found at other lines
    rejects: tuple[Reject, ...]


def is_llama_tree(tree: Path) -> bool:
    return all(
        (tree / name).is_file() for name in ("CMakeLists.txt", "include/llama.h", "ggml/include/ggml.h")
    )


def copy_tree(tree: Path, target: Path) -> Path:
    """The part of `tree` that matters here, which may be written to; links stay links, wherever they lead."""
    target.mkdir(parents=True)
    for path in tree.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy2(path, target)
    for name in FOLDERS:
        if (tree / name).is_dir():
            shutil.copytree(
                tree / name, target / name, symlinks=True, ignore=shutil.ignore_patterns(".git", "ui")
            )
    for path in target.rglob("*"):  # the tree may be read-only
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    return target


def apply_patches(scratch: Path, patches: Sequence[Patch]) -> list[Applied]:
    """Each in order, as far as it goes: a later one may lie on what an earlier one left out."""
    return [apply_patch(scratch, patch) for patch in patches]


def apply_patch(scratch: Path, patch: Patch) -> Applied:
    """No fuzz: a hunk may have moved, its lines and those around it may not have changed."""
    options = ("apply", "--whitespace=nowarn", "--verbose")
    done = run_git(scratch, *options, "-", stdin=patch.text)
    n_moved = len(_MOVED.findall(done.stderr))
    if done.returncode == 0:
        return Applied(patch.name, n_moved, ())
    rejects = []
    for path, text in file_parts(patch):
        done = run_git(scratch, *options, "--reject", "-", stdin=text)
        (scratch / f"{path}.rej").unlink(missing_ok=True)
        rejects += rejects_of(path, text, done.stderr) if done.returncode else []
    return Applied(patch.name, n_moved, tuple(rejects))


def file_parts(patch: Patch) -> list[tuple[str, str]]:
    """(path, diff) of each file that the patch touches."""
    parts = patch.text.split("\ndiff --git ")[1:]
    return [(part.split(" b/")[1].split("\n")[0], f"diff --git {part}\n") for part in parts]


def rejects_of(path: str, text: str, stderr: str) -> list[Reject]:
    """What git said, hunk by hunk."""
    hunks = re.findall(r"^@@ .*", text, re.MULTILINE)
    numbers = [int(n) for n in _REJECTED.findall(stderr)]
    if not numbers:
        said = [line for line in stderr.splitlines() if line.startswith("error:")]
        return [Reject(path, 0, said[0].removeprefix("error: ") if said else stderr.strip())]
    return [Reject(path, n, hunks[n - 1]) for n in numbers]
