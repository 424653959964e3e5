"""benchmarks/replay_speculation.py: the bounds hold in a few of its scenarios, and two runs agree."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from conftest import ROOT


@cache
def replay(*arguments: str) -> Any:
    script = ROOT / "benchmarks/replay_speculation.py"
    command = [sys.executable, script, "--seeds", "1", "--json", "-", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize(("drafter", "loss"), [("ngram", 0.05), ("draft", 0.08)])
@pytest.mark.parametrize("setting", ["10ms", "three"])
def test_bounds(setting: str, drafter: str, loss: float) -> None:
    """One seed: luck moves a stream by 2 %."""
    groups = replay("--settings", "10ms,three", "--costs", "union,dear")["groups"]
    for group in groups:
        if (group["setting"], group["drafter"]) == (setting, drafter):
            assert group["loss"] <= loss + 0.02, group["worst"]
            assert group["mix"] >= 0.96
            assert group["mean"] >= 1.0


def test_same_numbers_every_time() -> None:
    """No clock decides anything."""
    arguments = ("--settings", "server", "--costs", "switch", "--jobs")
    assert replay(*arguments, "1") == replay(*arguments, "2")
