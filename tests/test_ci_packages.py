""".ci/packages: what it installs, when, and what it says where it cannot. apt-get and others are played."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "packages"
PLAYED = {
    "id": "echo 0",
    "dpkg-query": "exit 1",
    "apt-get": 'echo "$@" >> calls',
    "timeout": '[[ $1 == --kill-after=10 && $2 == 300 ]] || exit 9; shift 2; exec /usr/bin/timeout 2 "$@"',
}


def run(folder: Path, *, ci: str | None = "true", **played: str) -> subprocess.CompletedProcess[str]:
    """The script, in a folder of its own, where these programs are other ones."""
    programs = folder / "programs"
    programs.mkdir()
    for name, body in (PLAYED | {key.replace("_", "-"): body for key, body in played.items()}).items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}{os.pathsep}/usr/bin:/bin"} | ({} if ci is None else {"CI": ci})
    done = subprocess.run([SCRIPT], cwd=folder, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert done.stdout == ""
    return done


def calls(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_what_checks_run_on_is_installed(tmp_path: Path) -> None:
    assert run(tmp_path).stderr == ""
    update, install = calls(tmp_path)
    assert update.endswith("update")
    assert install.endswith("haproxy libvulkan-dev glslc spirv-headers mesa-vulkan-drivers")


@pytest.mark.parametrize(
    ("ci", "played"),
    [(None, {}), ("false", {}), ("true", {"id": "echo 1000"}), ("true", {"dpkg_query": "exit 0"})],
    ids=["no CI", "CI off", "not root", "all there"],
)
def test_nothing_is_installed_and_nothing_said(
    tmp_path: Path, ci: str | None, played: dict[str, str]
) -> None:
    assert run(tmp_path, ci=ci, **played).stderr == ""
    assert calls(tmp_path) == []


@pytest.mark.parametrize(
    ("apt_get", "said"),
    [
        ("echo E: many; echo E: words; exit 100", "apt-get failed"),
        ("sleep 20", "took more than 300 s"),
    ],
)
def test_a_failure_is_one_line_and_no_end(tmp_path: Path, apt_get: str, said: str) -> None:
    (line,) = run(tmp_path, apt_get=apt_get).stderr.splitlines()
    assert said in line
    assert "not installed: haproxy" in line
