"""The pin: the one llama.cpp commit that this is made for, as cmake/pin.json names it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PIN_FILE: Final = ROOT / "cmake" / "pin.json"


class PatchError(Exception):
    """A message for the user: what failed, with which values, what to do."""


@dataclass(frozen=True)
class Pin:
    """The one place that names the llama.cpp commit: cmake/pin.json."""

    url: str
    commit: str
    tag: str
    sdist_name: str
    sdist_version: str
    sdist_sha256: str
    sdist_tree: str

    @property
    def sdist_stem(self) -> str:
        return f"{self.sdist_name.replace('-', '_')}-{self.sdist_version}"

    @property
    def requirement(self) -> str:
        return f"{self.sdist_name}=={self.sdist_version}"


def read_pin() -> Pin:
    pin = json.loads(PIN_FILE.read_text())
    llama, sdist = pin["llama_cpp"], pin["sdist"]
    return Pin(
        url=llama["url"],
        commit=llama["commit"],
        tag=llama["tag"],
        sdist_name=sdist["name"],
        sdist_version=sdist["version"],
        sdist_sha256=sdist["sha256"],
        sdist_tree=sdist["tree"],
    )


def log(text: str) -> None:
    print(f"patches: {text}", file=sys.stderr)
