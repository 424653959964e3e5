"""Whoever takes --rpc refuses a server of another version, and sends it nothing but the greeting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_rpc import fake_server, says
from serving import TARGET, environment, run_pyspac

from pyspac.engine import rpc

COMMANDS = {
    "run": ("-p", "a", "-n", "2"),
    "run --device": ("-p", "a", "-n", "2", "--device", "RPC0"),
    "chat": (),
    "bench": ("-n", "2", "--rounds", "2"),
    "profile": ("--rounds", "1"),
    "serve": ("--restart",),
}
VERSIONS = {
    (6, 0, 0): "speaks version 6.0.0 of the protocol, and this build 7.0",
    (7, 0, 0): "is not of this build (protocol 7.0.0): it cannot skip absent experts",
}


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("command", COMMANDS)
def test_before_anything_is_sent(command: str, version: tuple[int, int, int], tmp_path: Path) -> None:
    name, arguments = command.split()[0], COMMANDS[command]
    with fake_server(says(*version)) as (endpoint, received):
        done = run_pyspac(
            name, "-m", str(TARGET), *arguments, "--rpc", endpoint, cache_dir=tmp_path, timeout_s=60
        )
    assert done.returncode == 2, done.stderr
    assert f"the RPC server at {endpoint} {VERSIONS[version]}" in done.stderr
    assert received == rpc._REQUEST


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_the_drop_in(version: tuple[int, int, int], tmp_path: Path) -> None:
    program = f"""
import pyspac
try:
    pyspac.Llama({str(TARGET)!r}, rpc=["{{}}"], cache="25%", verbose=False)
except ValueError as error:
    print(error)
"""
    with fake_server(says(*version)) as (endpoint, received):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("{}", endpoint)],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(tmp_path),
        )
    assert done.returncode == 0, done.stderr
    assert f"the RPC server at {endpoint} {VERSIONS[version]}" in done.stdout
    assert received == rpc._REQUEST
