"""Compiles, without writing anything, what depends on llama.cpp's headers: libspac and the patched sources.

How each is compiled comes from the last build (compile_commands.json); only the tree is another one.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.patches.pin import ROOT

TREE: Final = ROOT / "build" / "llama.cpp"
ENGINE: Final = ROOT / "engine" / "src"
TIMEOUT_S: Final = 120.0
_LLAMA_HEADER: Final = re.compile(r'^#\s*include "(?:ggml|llama)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One source; `error` is the compiler's first, None: it compiles."""

    source: str  # in our repository, or in llama.cpp
    error: str | None


@dataclass(frozen=True, slots=True)
class Command:
    """A line of compile_commands.json, with `-fsyntax-only` in place of an output."""

    source: str
    argv: tuple[str, ...]
    folder: Path


def read_commands(build_dir: Path, scratch: Path, patched: Sequence[str]) -> list[Command]:
    """Libspac's sources that include llama.cpp's headers, and the patched sources in `scratch`.

    Raises FileNotFoundError where `build_dir` was never configured.
    """
    entries = json.loads((build_dir / "compile_commands.json").read_text(encoding="utf-8"))
    commands: dict[str, Command] = {}
    for entry in entries:
        path = Path(entry["file"])
        is_ours = path.is_relative_to(ENGINE) and includes_llama(path)
        is_patched = path.is_relative_to(TREE) and str(path.relative_to(TREE)) in patched
        if not (is_ours or is_patched):
            continue
        name = str(path.relative_to(ROOT if is_ours else TREE))
        argv = check_only(entry["command"], scratch)
        commands.setdefault(name, Command(name, tuple(argv), Path(entry["directory"])))
    return list(commands.values())


def includes_llama(source: Path) -> bool:
    """Itself, or by way of a header of ours: then its own words name a type of ggml's or llama.cpp's."""
    text = source.read_text(encoding="utf-8")
    return _LLAMA_HEADER.search(text) is not None or re.search(r"\b(ggml|llama|llm)_\w", text) is not None


def check_only(command: str, scratch: Path) -> list[str]:
    """The command, on `scratch` instead of the build's tree, writing nothing."""
    parts = [part.replace(str(TREE), str(scratch)) for part in shlex.split(command)]
    at = parts.index("-o")
    del parts[at : at + 2]
    return [part for part in parts if part != "-Werror"] + ["-fsyntax-only"]


def compile_all(commands: Sequence[Command], scratch: Path, jobs: int) -> list[Compiled]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda command: compile_one(command, scratch), commands))


def compile_one(command: Command, scratch: Path) -> Compiled:
    try:
        done = subprocess.run(
            command.argv, cwd=command.folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Compiled(command.source, f"the compiler was not done after {TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return Compiled(command.source, None)
    return Compiled(
        command.source, first_error(done.stderr).replace(f"{scratch}/", "").replace(f"{ROOT}/", "")
    )


def first_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if re.search(r"\berror:", line)]
    return errors[0] if errors else stderr.strip()[-300:]
