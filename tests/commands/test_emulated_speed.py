"""`--device emulated:0.3`: a device beside the host's experts on which the balancer decides."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands.demo import TARGET

RUN = ("run", "-m", str(TARGET), "-p", "def read(", "-n", "40", "--temp", "0", "-t", "2", "--cache", "40%")


def test_the_balancer_decides_by_times_that_were_seen() -> None:
    texts = []
    for device in ("emulated:0.05", "emulated"):
        result = CliRunner().invoke(app, [*RUN, "--device", device, "--host-kernels", "spac", "--json", "-"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        texts.append(found["token_ids"])
        balance = found["scheduler"]["balance"]
        assert balance["is_balanced"] == (device != "emulated")
        if device != "emulated":  # 20 times the host's: a busy machine makes either some times slower
            assert balance["device_expert_us"][0] > 1.5 * balance["host_expert_us"][0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "device", ["emulated:0", "emulated:x", "emulated:", "emulated:0.3,CPU", "CPU,emulated:1"]
)
def test_bad_speeds(device: str) -> None:
    result = CliRunner().invoke(app, [*RUN, "--device", device])
    assert result.exit_code == 2
    assert "emulated" in result.output
