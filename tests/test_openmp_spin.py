"""pyspac.openmp_spin: OpenMP spins for less than a time slice, here and in a server, unless told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from serving import Serve

from pyspac.openmp_spin import CHOSEN_BY, N_SPINS, SPIN_COUNT, spin_environment

LOAD = "import os, pyspac._native; print(os.environ.get('GOMP_SPINCOUNT'))"


def environ(**chosen: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in CHOSEN_BY} | chosen


@pytest.mark.parametrize(
    ("chosen", "found"),
    [({}, N_SPINS), ({"OMP_WAIT_POLICY": "passive"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_the_engine_is_loaded_with_it(chosen: dict[str, str], found: str) -> None:
    """As GNU's OpenMP itself says where it is the one that is used, and as the variable is."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD],
        env=environ(**chosen) | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert run.stdout.strip() == found
    said = [line for line in run.stderr.splitlines() if SPIN_COUNT in line]
    if said and found != "None":
        assert f"'{found}'" in said[0]


def test_who_has_chosen_keeps_it() -> None:
    assert spin_environment({}) == {SPIN_COUNT: N_SPINS}
    assert spin_environment({"OMP_WAIT_POLICY": "active"}) == {}
    assert spin_environment({SPIN_COUNT: "0"}) == {}


def test_a_server_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    with Serve(tmp_path).wait_ready() as serve:
        assert psutil.Process(serve.server_pid).environ()[SPIN_COUNT] == N_SPINS
