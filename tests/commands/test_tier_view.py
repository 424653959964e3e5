"""How `pyspac inspect --ram` writes its predictions."""

from __future__ import annotations

import pytest
from conftest import ROOT

from pyspac.commands.common import output_console
from pyspac.commands.tier_view import TierView
from pyspac.model.checks import check_model_file
from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.geometry import read_geometry
from pyspac.model.speed_forecast import Machine
from pyspac.model.tier_forecast import TierForecast
from pyspac.units import GIB


def test_only_what_decoding_needs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, attended = [], []
    monkeypatch.setattr(
        "pyspac.engine.engine.measure_kernel_gb_s", lambda name, n, _: widths.append(n) or 9.0
    )
    monkeypatch.setattr(
        "pyspac.engine.engine.measure_attention_gop_s", lambda n, *_: attended.append(n) or 9.0
    )
    header = check_model_file(ROOT / "pyspac/models/demo-moe.gguf")
    TierView.measure(header, read_geometry(header), [4 << 20], 1)
    assert set(widths) == set(attended) == {1}


@pytest.mark.parametrize(
    ("alike", "recorded", "text"),
    [(6.1, 20.04, "6.1 to 20"), (99.94, 4392.0, "99.9 to 4,392"), (123.4, 123.4, "123")],
)
def test_speeds_without_exponents(
    alike: float, recorded: float, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = TierForecast(
        ram_bytes=8 * GIB, least_bytes=1, n_in_memory=1, n_on_disk=1, other_bytes=1,
        tps_alike=alike, tps_recorded=recorded,
    )  # fmt: skip
    disk = DiskSpeed(path="f", piece_bytes=10**6, is_direct=True, depth_1_gb_s=0.5, depth_32_gb_s=1.0)
    machine = Machine(ram_bytes=0, memory_gb_s=10.0, kernels={}, disk=disk)
    TierView(machine=machine, forecasts=[found]).show(output_console())
    row = next(line for line in capsys.readouterr().out.split("\n") if line.startswith("8 "))
    assert row.rstrip().endswith(f"  {text}")
