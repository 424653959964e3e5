"""How much memory of the host is free: nothing in, bytes out. A container's limit counts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes: of the machine, or of this process's cgroup, which a container has."""
    free = int(psutil.virtual_memory().available)
    limits = [limit for limit in map(_limit, _cgroups()) if limit is not None]
    used = int(psutil.Process().memory_info().rss)
    return max(0, min([free, *(limit - used for limit in limits)]))


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
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # ValueError: "max"
            continue
    return None
