"""A release's files, into an empty folder: the sdist, wheels built from it, their checksums; all checked.

    python -m tools.wheels.release dist                          what `make check-release` runs
    python -m tools.wheels.release dist --variants x64,haswell   with some of ggml's CPU variants only

The wheels come from the unpacked sdist, so it holds all that a build needs. They are installed in an empty
environment of each Python that this machine has, and run there (tools/wheels/check.py). Exit code 1 if
something does not fit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Final

from tools.patches.pin import ROOT, read_pin
from tools.patches.pristine import find_sdist
from tools.wheels.check import check

CHECKSUMS: Final = "SHA256SUMS"  # as sha256sum writes them


class ReleaseError(Exception):
    """Something of a release is missing; the text says what."""


def version_of(root: Path) -> str:
    """The version that is to be released: the same everywhere, and with its notes. Raises ReleaseError."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    wanted = {
        "pyspac/__init__.py": f'__version__ = "{version}"',
        "CHANGELOG.md": f"\n## [{version}]",
        f"packaging/notes/v{version}.md": f"# pyspac {version}",
    }
    for name, text in wanted.items():
        path = root / name
        if not path.is_file() or text not in path.read_text(encoding="utf-8"):
            raise ReleaseError(f"{name} has no {text.strip()!r}: the version is {version} in pyproject.toml")
    return version


def build_sdist(root: Path, out: Path, version: str) -> Path:
    """Raises CalledProcessError."""
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(out), str(root)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return out / f"pyspac-{version}.tar.gz"


def build_wheels(sdist: Path, out: Path, folder: Path, variants: str) -> None:
    """From the archive only; llama.cpp's comes from the checkout's cache. Raises CalledProcessError."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    bindings = find_sdist(ROOT / "build", read_pin())
    command = [sys.executable, "-m", "tools.wheels", "--variants", variants, "--out", str(out)]
    subprocess.run(
        [*command, "--build", str(ROOT / "build")],
        cwd=source, env={**os.environ, "PYSPAC_SDIST": str(bindings)}, check=True, stdout=sys.stderr,
    )  # fmt: skip


def write_checksums(folder: Path) -> Path:
    """Of all files there, by `sha256sum -c` to be checked."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    return folder / CHECKSUMS


def release(out: Path, variants: str) -> None:
    version = version_of(ROOT)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sdist = build_sdist(ROOT, out, version)
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="release-", dir=ROOT / "build") as folder:
        build_wheels(sdist, out, Path(folder), variants)
    if not list(out.glob(f"pyspac-{version}-*.whl")):
        raise ReleaseError(f"{out} has no wheel of {version}")
    check(out)
    print(write_checksums(out).read_text(encoding="utf-8"), end="")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="an own folder: what is in it is removed")
    parser.add_argument("--variants", default="all", metavar="A,B,...", help="ggml's CPU variants")
    given = parser.parse_args()
    try:
        release(given.out.resolve(), given.variants)
    except (ReleaseError, AssertionError, subprocess.CalledProcessError) as error:
        sys.exit(f"this is no release: {error}")


if __name__ == "__main__":
    main()
