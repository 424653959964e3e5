"""The patches: files of patches/ in, what each says and touches out, in the order in which they apply."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.patches.pin import ROOT

PATCH_DIR: Final = ROOT / "patches"
FOLDERS: Final = ("upstream", "hooks")  # applied in this order


@dataclass(frozen=True)
class Patch:
    """One file of patches/; `name` is its path there, such as upstream/0001-ggml-cpu-skip.patch."""

    name: str
    text: str
    subject: str = ""
    trailers: dict[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()  # files of llama.cpp that it touches
    n_added: int = 0
    n_removed: int = 0

    @property
    def folder(self) -> str:
        return self.name.split("/")[0]

    @property
    def number(self) -> int:
        return int(self.name.split("/")[1][:4])

    @property
    def slug(self) -> str:
        return self.name.split("/")[1][5:].removesuffix(".patch")

    @property
    def size(self) -> str:
        return f"+{self.n_added} -{self.n_removed}"

    @property
    def status(self) -> str:
        return self.trailers.get("Upstream-Status", "")


def parse_patch(name: str, text: str) -> Patch:
    head, _, diff = text.partition("\ndiff --git ")
    diff = "diff --git " + diff
    return Patch(
        name=name,
        text=text,
        subject=parse_subject(head),
        trailers=dict(re.findall(r"^([A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)+): +(.+)$", head, re.MULTILINE)),
        paths=tuple(dict.fromkeys(re.findall(r"^diff --git a/(?:\S+) b/(\S+)$", diff, re.MULTILINE))),
        n_added=len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)),
        n_removed=len(re.findall(r"^-(?!-- )", diff, re.MULTILINE)),
    )


def parse_subject(head: str) -> str:
    """The subject of a mail header, unfolded."""
    found = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", head, re.MULTILINE)
    return re.sub(r"\n[ \t]", " ", found.group(1)) if found else ""


def read_patches(root: Path = PATCH_DIR) -> list[Patch]:
    """All patches, in the order in which they apply."""
    names = [
        f"{folder}/{path.name}" for folder in FOLDERS for path in sorted((root / folder).glob("*.patch"))
    ]
    return [parse_patch(name, (root / name).read_text()) for name in names]


def slugify(subject: str) -> str:
    """File name part of a subject, by the rules of git format-patch."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", subject).strip("-.")[:52].rstrip("-.")


def touched(patches: Sequence[Patch]) -> list[str]:
    return sorted({path for patch in patches for path in patch.paths})
