"""What a release needs: one version everywhere, its notes, and checksums that sha256sum takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

import pyspac
from tools.wheels.release import CHECKSUMS, ReleaseError, version_of, write_checksums


def test_the_version_is_the_same_everywhere() -> None:
    version = version_of(ROOT)
    assert version == pyspac.__version__
    assert "**Losses**" in (ROOT / f"packaging/notes/v{version}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["pyspac/__init__.py", "CHANGELOG.md", "packaging/notes/v0.2.0.md"])
def test_a_file_of_another_version_is_named(name: str, tmp_path: Path) -> None:
    for other in ("pyproject.toml", "pyspac/__init__.py", "CHANGELOG.md", "packaging/notes/v0.2.0.md"):
        path = tmp_path / other
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / other).read_text(encoding="utf-8")
        path.write_text(text.replace("0.2.0", "0.1.9") if other == name else text, encoding="utf-8")
    with pytest.raises(ReleaseError, match=re.escape(name)):
        version_of(tmp_path)


def test_checksums_are_as_sha256sum_takes_them(tmp_path: Path) -> None:
    for name in ("a.whl", "b.tar.gz"):
        (tmp_path / name).write_bytes(name.encode())
    write_checksums(tmp_path)
    write_checksums(tmp_path)  # its own file is not among them
    command = ["sha256sum", "-c", CHECKSUMS]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / "a.whl").write_bytes(b"another")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
