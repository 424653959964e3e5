"""How much memory of the host is free: nothing in, bytes out. A container's limit counts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")


# of a cgroup's memory.stat: pages of files, which the kernel takes back when memory is short; v1 counts those
# of the groups below in names of their own
_RECLAIMABLE: Final = ("inactive_file", "active_file", "slab_reclaimable")


def free_memory() -> int:
    """Bytes: of the machine, or of this process's cgroups, which a container has.

    Of a cgroup's limit what all of its processes use is taken, less the pages of files.
    """
    free = int(psutil.virtual_memory().available)
    limits = ((folder, limit) for folder in _cgroups() if (limit := _limit(folder)) is not None)
    return max(0, min([free, *(limit - _used(folder) for folder, limit in limits)]))


def _used(folder: Path) -> int:
    """Bytes that a cgroup cannot give back; where it does not tell, what this process has."""
    current = _number(folder, "memory.current", "memory.usage_in_bytes")
    if current is None:
        return int(psutil.Process().memory_info().rss)
    try:
        rows = (line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        stat = {row[0]: int(row[1]) for row in rows}
    except (OSError, ValueError, IndexError):
        stat = {}
    return max(0, current - sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in _RECLAIMABLE))


def _cgroups() -> list[Path]:
    """Folders of this process's cgroups of memory, v1 and v2, and those above them."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            folder = root / path.lstrip("/")
            found += [folder, *(above for above in folder.parents if root in (above, *above.parents))]
    return found


def _limit(folder: Path) -> int | None:
    return _number(folder, "memory.max", "memory.limit_in_bytes")


def _number(folder: Path, *names: str) -> int | None:
    """Of the first of these files that has one."""
    for name in names:
        try:
            return int((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # ValueError: "max"
            continue
    return None
