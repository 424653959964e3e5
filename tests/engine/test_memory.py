"""Free memory: one function, which a container's limit binds, and all that ask it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspac.commands import doctor_checks
from pyspac.engine import memory
from pyspac.engine.devices import cpu_device, fits_memory
from pyspac.units import GIB

LIMIT = 3 << 29  # of a container: 1.5 GiB


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("memory.max", "max"), ("memory.limit_in_bytes", str(LIMIT))):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_cgroups", lambda: [tmp_path])
    return tmp_path


def test_a_containers_limit_counts(container: Path) -> None:
    assert memory.free_memory() < LIMIT
    (container / "memory.max").write_text("1")
    assert memory.free_memory() == 0


@pytest.mark.parametrize(
    ("used", "stat"),
    [
        ("memory.current", "anon 5\ninactive_file {0}\nactive_file {0}\nslab_reclaimable {0}\n"),
        ("memory.usage_in_bytes", "inactive_file 0\ntotal_inactive_file {0}\ntotal_active_file {1}\n"),
    ],
    ids=["v2", "v1"],
)
def test_what_others_use_counts_and_pages_of_files_do_not(container: Path, used: str, stat: str) -> None:
    """A GiB is in use, of which 300 MiB are pages of files, in a container of 1.5 GiB."""
    (container / used).write_text(str(GIB))
    assert memory.free_memory() == LIMIT - GIB
    (container / "memory.stat").write_text(stat.format(100 << 20, 200 << 20))
    assert memory.free_memory() == LIMIT - GIB + (300 << 20)


def test_all_that_ask_hear_of_it(container: Path) -> None:
    assert fits_memory(1 << 20)
    assert not fits_memory(LIMIT)
    assert cpu_device().memory_free < LIMIT
    host, low = doctor_checks._memory()
    assert "only" in low.detail
    assert float(low.detail.split()[1]) <= LIMIT / GIB
    assert "--ram" in low.mend
    assert host.level == "ok"


def test_the_folders_of_this_process() -> None:
    assert all(memory.CGROUPS in (path, *path.parents) for path in memory._cgroups())
