"""`pyspac fit`: what it shows, what it refuses, and what it measures."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from serving import wait_for
from typer.testing import CliRunner, Result

from pyspac.cli import app
from pyspac.commands import fit, machine_speed
from pyspac.engine.engine import has_kernels, measure_attention_gop_s, measure_kernel_gb_s
from pyspac.errors import EngineError
from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.known_models import known_models
from pyspac.model.speed_forecast import WIDTHS, KernelSpeed, Machine

TARGET = ROOT / "pyspac/models/demo-moe.gguf"
DISK = DiskSpeed(path="x", piece_bytes=1 << 20, is_direct=True, depth_1_gb_s=1.0, depth_32_gb_s=1.0)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["fit", *map(str, arguments)])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine, without measuring one."""

    def machine(
        _n: int, ram_bytes: int, vram_bytes: int, _model: Path | None, types: Iterable[str]
    ) -> Machine:
        kernels = {name: KernelSpeed((10.0, 5.0, 2.0, 1.0)) for name in types}
        return Machine(
            ram_bytes=ram_bytes, vram_bytes=vram_bytes, memory_gb_s=20.0, kernels=kernels, disk=DISK
        )

    monkeypatch.setattr(fit, "measure", machine)


def rows(*arguments: object) -> dict[tuple[str, str], dict[str, Any]]:
    done = invoke(*arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    return {(row["name"], row["quantisation"]): row for row in json.loads(done.output)["models"]}


@pytest.mark.usefixtures("measured")
def test_every_model_has_a_row() -> None:
    found = rows("--ram", "16G")
    names = {(m.name, quant) for m in known_models().values() if m.total_b for quant in m.quantisations}
    assert set(found) == names
    assert found["Qwen3-30B-A3B", "Q4_K_M"]["place"] == "disk"
    assert found["DeepSeek-V2-Lite", "Q4_K_M"]["place"] == "memory"
    assert found["DeepSeek-V3", "Q4_K_M"]["decode_tps"] is None
    assert {row["basis"] for row in found.values()} == {"predicted"}
    assert rows("--ram", "64G")["Qwen3-30B-A3B", "Q4_K_M"]["place"] == "memory"


@pytest.mark.usefixtures("measured")
def test_with_a_card_nothing_was_measured() -> None:
    found = rows("--ram", "16G", "--vram", "8G")
    assert found["Qwen3-30B-A3B", "Q4_K_M"]["basis"] == "predicted, never measured on a GPU"
    text = invoke("--ram", "16G", "--vram", "8G").output
    assert "predicted, never measured" in text
    assert "not below 17.7 GiB" in text
    assert "card, 33% on disk" in text
    text = invoke("--ram", "16G").output
    assert "% on disk" in text
    assert "without a unit" not in text
    assert "A number without a unit is MiB" in invoke("--ram", "16").output


@pytest.mark.usefixtures("measured")
def test_a_file_of_ones_own() -> None:
    done = invoke(TARGET, "--ram", "1G")
    assert done.exit_code == 0
    assert "Demo Moe Q5_K" in done.output


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ram", "much"], "--ram"),
        (["--ram", "0"], "--ram"),
        (["--ram", "25%"], "--ram"),
        (["--vram", "-1"], "--vram"),
        (["-c", "0"], "-c"),
        (["-t", "0"], "-t"),
        (["missing.gguf"], "missing.gguf"),
        (["--json", "/missing/x.json"], "--json"),
    ],
)
def test_nonsense(arguments: list[str], said: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("size", ["abc", "auto", "25%", "0", "-1", "1e99G", ""])
def test_a_size_that_is_none(size: str) -> None:
    """What it advises works here: neither a share nor auto is the size of a card."""
    output = " ".join(invoke("--vram", size).output.split())
    assert f"--vram cannot be {size!r}: give GiB (8G) or MiB (8000), more than 0" in output
    assert "auto" not in output.replace(repr(size), "")


@pytest.mark.usefixtures("measured")
def test_a_dense_model() -> None:
    done = invoke(ROOT / "pyspac/models/demo-draft.gguf")
    assert done.exit_code == 2
    assert "dense" in done.output


@pytest.mark.skipif(not has_kernels("Q4_K"), reason="the engine has no kernels for this processor")
def test_kernels_are_measured() -> None:
    """A weight that serves more tokens takes longer, but not in proportion; widths so far apart that a shared
    machine, which changes its speed five times within a second, does not swap them."""
    found = [measure_kernel_gb_s("Q4_K", n, 1) for n in (1, 512)]
    assert 0.01 < found[1] < found[0] < 1000.0
    assert 512 * found[1] > found[0]
    assert all(0.01 < measure_kernel_gb_s("Q4_K", n, 1) < 1000.0 for n in WIDTHS)
    with pytest.raises(EngineError, match="512 tokens"):
        measure_kernel_gb_s("Q4_K", 513, 1)
    with pytest.raises(EngineError, match="no kernel"):
        measure_kernel_gb_s("F32", 1, 1)
    assert measure_attention_gop_s(512, 1) > measure_attention_gop_s(1, 1) > 0
    with pytest.raises(EngineError, match="1 to 512 tokens"):
        measure_attention_gop_s(513, 1)


def test_a_machine_is_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians, and how far memory, attention and kernels of one token went from them together."""
    engine = importlib.import_module("pyspac.engine.engine")
    slowness = iter((1.0, 0.8, 4.0, 1.0, 1.25))  # of each turn, with attention first
    now = [1.0]

    def attention(n: int, _: int) -> float:
        now[0] = next(slowness) if n == 1 else now[0]
        return 10.0 * n / now[0]

    monkeypatch.setattr(engine, "has_kernels", lambda _: True)
    monkeypatch.setattr(engine, "measure_attention_gop_s", attention)
    monkeypatch.setattr(engine, "measure_host_gb_s", lambda _: 30.0 / now[0])
    monkeypatch.setattr(engine, "measure_kernel_gb_s", lambda _, n, __: 1360.0 / n / now[0])
    monkeypatch.setattr(machine_speed, "measure_disk", lambda *_: DISK)
    found = machine_speed.measure(1, 0, 0, TARGET, ["Q4_K"])
    assert found.kernels == {"Q4_K": KernelSpeed((1360.0, 170.0, 34.0, 10.0))}
    assert found.attention_gop_s == (10.0, 5120.0)
    assert found.memory_gb_s == 30.0
    assert found.varied == (0.25, 1.25)


def test_what_other_programs_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four cores others take three while two threads measure: half of what these want is gone."""
    engine = importlib.import_module("pyspac.engine.engine")
    seconds = iter((0.0, 60.0, 80.0))
    monkeypatch.setattr(engine, "has_kernels", lambda _: False)
    monkeypatch.setattr(engine, "measure_attention_gop_s", lambda *_: 10.0)
    monkeypatch.setattr(engine, "measure_host_gb_s", lambda _: 30.0)
    monkeypatch.setattr(machine_speed, "measure_disk", lambda *_: DISK)
    monkeypatch.setattr(machine_speed, "_others_s", lambda: next(seconds))
    monkeypatch.setattr(machine_speed, "time", SimpleNamespace(perf_counter=lambda: now.pop(0)))
    monkeypatch.setattr(machine_speed, "psutil", SimpleNamespace(cpu_count=lambda: 4))
    now = [0.0, 20.0]
    assert machine_speed.measure(2, 0, 0, TARGET).others_share == 0.5
    now = [0.0, 20.0]
    seconds = iter((0.0, 20.0))
    assert machine_speed.measure(2, 0, 0, TARGET).others_share == 0.0


def test_time_of_others_goes_on() -> None:
    """This process's own is not theirs."""
    before = machine_speed._others_s()
    began = time.process_time()
    while time.process_time() < began + 0.2:
        pass
    assert before - 0.05 < machine_speed._others_s()


@pytest.mark.usefixtures("measured")
def test_a_machine_whose_speed_varied_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "median speed" not in invoke("--ram", "16G").output
    steady = fit.measure
    monkeypatch.setattr(fit, "measure", lambda *given: replace(steady(*given), varied=(0.75, 1.25)))
    assert "Kernels ran at 0.75 to 1.25 times their median speed" in invoke("--ram", "16G").output


@pytest.mark.usefixtures("measured")
def test_a_machine_with_other_programs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Other programs" not in invoke("--ram", "16G").output
    quiet = fit.measure
    monkeypatch.setattr(fit, "measure", lambda *given: replace(quiet(*given), others_share=0.5))
    assert "Other programs took 50% of the cores meanwhile" in invoke("--ram", "16G").output


def test_the_probe_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").mkdir()
    sizes = []

    def look(path: Path) -> DiskSpeed:
        sizes.append(path.stat().st_size)
        return DISK

    assert machine_speed._on_probe(look) is DISK
    assert sizes == [256 << 20]
    assert list((tmp_path / ".cache").iterdir()) == []


def test_the_probe_lies_elsewhere_if_it_must(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """~/.cache is missing, or a file system that is read only, which root cannot write either."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = []
    machine_speed._on_probe(lambda path: (folders.append(path.parent), DISK)[1])
    (tmp_path / ".cache").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    machine_speed._on_probe(lambda path: (folders.append(path.parent), DISK)[1])
    assert folders == [tmp_path, tmp_path]


def test_a_disk_that_fills_up_is_no_fault_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    monkeypatch.setattr(fit, "measure", lambda *_: machine_speed._on_probe(lambda _: DISK))
    done = invoke("--ram", "8G")
    assert done.exit_code == 1
    assert "cannot be measured: Disk quota exceeded" in done.output


def test_the_probe_leaves_nothing_when_killed(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    code = (
        "import os, signal; from pyspac.commands import machine_speed; "
        "machine_speed._on_probe(lambda path: os.kill(os.getpid(), signal.SIGKILL))"
    )
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"HOME": str(tmp_path)})
    assert killed.returncode == -signal.SIGKILL
    wait_for("an empty folder", lambda: not list((tmp_path / ".cache").iterdir()), 10)


def test_what_decoding_found_leaves_out_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    weights = SimpleNamespace(n_layer_moe=2, n_expert_used=4, expert_bytes=100)
    run = {"n_tokens": 6, "prompt_read_bytes": 5000, "tier": {"read_bytes": 6000, "n_hit": 0, "n_miss": 60}}
    found = importlib.import_module("bench_fit").share_found
    assert found(run, weights) == 0.75, "of 5 * 2 * 4 experts, 1000 bytes of 4000 were read"
    assert found(run | {"tier": None}, weights) is None


def test_the_docs_have_the_tables_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python benchmarks/bench_fit.py --tables` writes them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    text = (ROOT / "docs/fit.md").read_text(encoding="utf-8")
    assert importlib.import_module("bench_fit").with_tables(text) == text
    assert "predicted, never measured" in text
