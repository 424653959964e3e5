"""The disk's speed, measured on a file of the test's own; and what follows from speeds that are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspac.errors import PyspacError
from pyspac.model import disk_probe
from pyspac.model.disk_probe import DiskSpeed, measure_disk
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
