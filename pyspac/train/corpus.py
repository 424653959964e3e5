"""The corpus: the standard library of the running Python in, hand-written modules out, some held out."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

LEFT_OUT_DIRS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data"}
GENERATED = re.compile(r"generated (from|by)|gencodec", re.IGNORECASE)
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class Module:
    """One source file of the standard library; `name` is its path below the library, with slashes."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Decided by the name alone, so that it is the same on every machine and in every run."""
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
