"""The disk's speed, measured on a file of the test's own; and what follows from speeds that are given."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyspac.commands.tier_view import disk_text
from pyspac.errors import PyspacError
from pyspac.model import disk_probe
from pyspac.model.disk_probe import DiskSpeed, measure_disk, measure_in_order
from pyspac.units import MIB


def test_latency_and_reads_by_hand() -> None:
    """1 MB alone takes 2 ms, among 32 one: 1 ms is latency, which what is asked for at once shares."""
    disk = DiskSpeed(path="f", piece_bytes=10**6, is_direct=True, depth_1_gb_s=0.5, depth_32_gb_s=1.0)
    assert disk.latency_us == pytest.approx(1000)
    assert disk.read_us(8e6) == pytest.approx(9000)
    assert disk.to_dict()["latency_us"] == disk.latency_us
    slower_when_busy = DiskSpeed(
        path="f", piece_bytes=10**6, is_direct=True, depth_1_gb_s=1.0, depth_32_gb_s=0.5
    )
    assert slower_when_busy.latency_us == 0.0
    assert slower_when_busy.to_dict()["slows_under_load"]
    assert "slows down under load" in disk_text(slower_when_busy)
    assert "slows down" not in disk_text(disk)


def test_depths_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is fast only at first: one reading of three, so the median does not have it."""
    depths: list[int] = []

    def read(fd: int, piece: int, n_pieces: int, depth: int, seconds: float, is_direct: bool) -> Any:
        depths.append(depth)
        gb = 9.0 if len(depths) == 1 else depth / 32
        return SimpleNamespace(gb=gb, gb_s=gb, cpu_s=0.25 * gb)

    monkeypatch.setattr(disk_probe, "_read", read)
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    disk = measure_disk(path)
    assert depths == [1, 32] * 3
    assert (disk.depth_1_gb_s, disk.depth_32_gb_s, disk.cpu_s_per_gb) == (1 / 32, 1.0, 0.25)


def test_every_reader_reads_once_even_if_it_starts_late(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    assert measure_disk(path, seconds=0.0).depth_32_gb_s > 0


def test_pieces_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, from anywhere, and again from the begin."""
    places: list[int] = []
    preadv = os.preadv

    def read(fd: int, buffers: list[mmap.mmap], at: int) -> int:
        places.append(at // disk_probe.BLOCK)
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", read)
    path = tmp_path / "file"
    path.write_bytes(b"x" * (7 * disk_probe.BLOCK))
    assert measure_in_order(path, disk_probe.BLOCK, seconds=0.0) > 0
    assert {places.count(i) for i in range(7)} <= {4, 5, 6}, "32 reads and the probe's"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_reads_go_into_huge_pages() -> None:
    """As the engine's do: a virtual disk reads into scattered pages less than half as fast."""
    memory = disk_probe._huge_pages(5 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert (len(memory), address % (2 * MIB)) == (5 * MIB, 0)
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    ends = (re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", area, re.M) for area in areas)
    (flags,) = (
        areas[i + 1].split("\n")[0].split()
        for i, end in enumerate(ends)
        if end and int(end[0][0], 16) <= address < int(end[0][1], 16)
    )
    assert "hg" in flags


@pytest.mark.parametrize("size", [1, 4096, 3 * MIB + 5])
def test_files_of_any_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    disk = measure_disk(path, MIB, seconds=0.02)
    assert disk.depth_1_gb_s > 0
    assert disk.depth_32_gb_s > 0
    assert disk.piece_bytes % 4096 == 0


def test_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_O_DIRECT", 0)
    path = tmp_path / "file"
    path.write_bytes(b"x" * MIB)
    disk = measure_disk(path, seconds=0.02)
    assert not disk.is_direct
    assert disk.depth_32_gb_s > 0


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PyspacError, match="none cannot be measured: No such file"):
        measure_disk(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(PyspacError, match="the file is empty"):
        measure_disk(tmp_path / "empty", seconds=0.02)
    with pytest.raises(PyspacError, match="none cannot be measured: No such file"):
        measure_in_order(tmp_path / "none")
