"""What we use of llama.cpp that is not public: the table in patches/README.md, looked up in a tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.patches.table import README

BEGIN: Final = "<!-- not public: read by python -m tools.pin_check -->"
END: Final = "<!-- not public end -->"
_CODE: Final = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Use:
    """One row of the table."""

    path: str  # of llama.cpp's file that has them
    names: tuple[str, ...]
    why: str
    tests: tuple[str, ...]  # file names without suffix


@dataclass(frozen=True, slots=True)
class Lookup:
    """Whether a name, or the file itself, is there."""

    path: str
    name: str  # "": the file
    is_found: bool
    tests: tuple[str, ...]


def read_table(readme: Path = README) -> list[Use]:
    """All rows. Raises ValueError where the table is missing."""
    text = readme.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| `")
    ]
    return [
        Use(_CODE.findall(path)[0], tuple(_CODE.findall(names)), why, tuple(_CODE.findall(tests)))
        for path, names, why, tests in rows
    ]


def look_up(tree: Path, uses: Sequence[Use]) -> list[Lookup]:
    """Every file of the table, and every name in it, as a whole word."""
    found = []
    for use in uses:
        path = tree / use.path
        found.append(Lookup(use.path, "", path.is_file(), use.tests))
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        found += [Lookup(use.path, name, has_word(text, name), use.tests) for name in use.names]
    return found


def has_word(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
