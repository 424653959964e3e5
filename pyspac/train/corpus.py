"""The corpus: the standard library of the running Python, or text files; pieces out, some held out."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from pyspac.errors import UsageError

LEFT_OUT_DIRS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data"}
GENERATED = re.compile(r"generated (from|by)|gencodec", re.IGNORECASE)
HELD_OUT_ONE_IN = 20
PIECE_CHARACTERS = 4000  # of a file: what is held out is chosen piece by piece


@dataclass(frozen=True, slots=True)
class Module:
    """A file of the standard library, `name` its path below the library, or a piece of another file."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Decided by the name, so that it is the same on every machine and in every run."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def read_stdlib() -> list[Module]:
    """Every hand-written module of the running Python's standard library, tests left out, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT_DIRS.isdisjoint(relative.parts) and not relative.parts[0].startswith("config-"):
            with contextlib.suppress(UnicodeDecodeError):
                modules.append(Module(relative.as_posix(), path.read_text(encoding="utf-8")))
    return [m for m in modules if m.text.strip() and not GENERATED.search(m.text[:400])]


def read_modules(path: Path | None) -> list[Module]:
    """The corpus: the standard library of the running Python, or the text files of a folder, or a file.

    Says on standard error how many files cannot be read. Raises UsageError where there is too little text.
    """
    if path is None:
        return read_stdlib()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    modules, left_out = [], []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            left_out.append(file.name)
            continue
        cuts = range(0, len(text), PIECE_CHARACTERS)
        modules += [Module(f"{file.name}#{i}", text[i : i + PIECE_CHARACTERS]) for i in cuts]
    if left_out:
        print(
            f"left out {len(left_out)} of the {len(files)} files of {path}, such as {left_out[0]}: "
            "they cannot be read as UTF-8 text",
            file=sys.stderr,
        )
    if not any(m.is_held_out for m in modules) or all(m.is_held_out for m in modules):
        raise UsageError(
            f"{path} has {len(modules)} pieces of {PIECE_CHARACTERS} characters of UTF-8 text, which is too "
            "little to hold some out; give a folder of text files with 400,000 characters or more"
        )
    return modules
