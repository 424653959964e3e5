"""Python packages without pip: wheels of a folder are unpacked beside each other into one folder."""

from __future__ import annotations

import zipfile
from pathlib import Path


def unpack_wheels(folder: Path, site: Path) -> int:
    """Unpack every wheel of `folder` into `site`, once; return how many are there."""
    wheels = sorted(folder.glob("*.whl"))
    stamp = site / ".unpacked"
    wanted = "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    if stamp.is_file() and stamp.read_text() == wanted:
        return len(wheels)
    site.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        unpack_wheel(wheel, site)
    stamp.write_text(wanted)
    return len(wheels)


def unpack_wheel(wheel: Path, site: Path) -> None:
    """A wheel is a zip file; NAME.data/purelib and platlib belong into the root, scripts into bin."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            target = place_of(member.filename)
            if target is None or member.is_dir():
                continue
            path = site / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(member))
            mode = member.external_attr >> 16 & 0o777
            path.chmod((mode or 0o644) | (0o111 if target.startswith("bin/") else 0))


def place_of(name: str) -> str | None:
    """Where a member goes, relative to the site folder; None: nowhere."""
    parts = name.split("/")
    if ".." in parts or name.startswith("/"):
        return None
    if not parts[0].endswith(".data"):
        return name
    if len(parts) > 2 and parts[1] in ("purelib", "platlib"):
        return "/".join(parts[2:])
    if len(parts) > 2 and parts[1] == "scripts":
        return "/".join(["bin", *parts[2:]])
    return None
