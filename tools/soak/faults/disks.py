"""Full file systems, only our own: others may be anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tools.soak.faults.fault import Fault

CHUNK: Final = 1 << 20  # a full file system is filled by so many bytes at a time


def fill(path: Path) -> None:
    """Grow a file until its file system is full."""
    chunk = bytes(CHUNK)
    with path.open("wb", buffering=0) as file:
        while chunk:
            try:
                file.write(chunk)
            except OSError:
                chunk = chunk[: len(chunk) // 2]  # to the last byte


class Full(Fault):
    """Only of file systems of our own: another's may be anything."""

    def folder(self) -> Path | None:
        raise NotImplementedError

    def why_not(self) -> str | None:
        return (
            None
            if self.folder()
            else "no small file system of its own (mount namespaces are not allowed here)"
        )

    def apply(self) -> bool:
        folder = self.folder()
        assert folder is not None
        filler = folder / f"soak-filler-{os.getpid()}"
        try:
            fill(filler)
            self.site.wait(self.rng.uniform(0.3, 3))
        finally:
            filler.unlink(missing_ok=True)
        return True


class FullShm(Full):
    name, resource = "shm-full", "shm"
    what = "fills /dev/shm for a while"

    def folder(self) -> Path | None:
        return self.site.shm_folder


class FullDisk(Full):
    name, resource = "disk-full", "disk"
    what = "fills the disk with saved slots and learned utilities for a while"

    def folder(self) -> Path | None:
        return self.site.disk_folder

    def apply(self) -> bool:
        self.site.n_full_disks += 1
        self.site.is_disk_full = True
        try:
            return super().apply()
        finally:
            self.site.is_disk_full = False
