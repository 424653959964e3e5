"""Reads and writes wheels: zip archives with a list of what is in them."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TIME: Final = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever it is written
_PLAIN_MODE: Final = 0o100644


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel; `mode` as in stat, since programs have to stay executable."""

    data: bytes
    mode: int = _PLAIN_MODE


def read_wheel(path: Path) -> dict[str, Member]:
    """All files by their names, but for the list of them."""
    with zipfile.ZipFile(path) as archive:
        return {
            info.filename: Member(archive.read(info), info.external_attr >> 16)
            for info in archive.infolist()
            if not info.is_dir() and not info.filename.endswith(".dist-info/RECORD")
        }


def write_wheel(path: Path, members: Mapping[str, Member]) -> None:
    """All files and the list of them, with their hashes. Source of the form: PEP 427."""
    dist_info = next(name for name in members if name.endswith(".dist-info/METADATA")).split("/")[0]
    lines = [f"{name},{_digest(member.data)},{len(member.data)}\n" for name, member in members.items()]
    record = f"{dist_info}/RECORD"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in {**members, record: Member("".join([*lines, f"{record},,\n"]).encode())}.items():
            info = zipfile.ZipInfo(name, _TIME)
            info.external_attr = member.mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.data)


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
