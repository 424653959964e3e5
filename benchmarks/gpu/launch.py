#!/usr/bin/env python3
"""First program of a bundle: unpacks its sources, then runs benchmarks/gpu/run.py out of them.

All options go to run.py; --help shows them. What is kept between commands (sources, build, model) is in the
folder `gpu` beside the bundle, or in --work DIR. No network is needed.
"""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent


def work_dir(argv: list[str]) -> Path:
    for i, argument in enumerate(argv):
        if argument == "--work" and i + 1 < len(argv):
            return Path(argv[i + 1]).resolve()
        if argument.startswith("--work="):
            return Path(argument.partition("=")[2]).resolve()
    return BUNDLE.parent / "gpu"


def unpack(archive: Path, folder: Path) -> int:
    """Write files whose content changed, so that an existing build goes on; remove those that are gone."""
    wanted: set[Path] = set()
    n_written = 0
    with tarfile.open(archive) as tar:
        for member in tar:
            path = (folder / member.name).resolve()
            if not member.isfile() or folder.resolve() not in path.parents:
                continue
            wanted.add(path)
            file = tar.extractfile(member)
            assert file is not None
            data = file.read()
            if path.is_file() and path.read_bytes() == data:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(member.mode & 0o777)
            n_written += 1
    for path in set(folder.resolve().rglob("*")) - wanted:
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".lock":
            path.unlink()
    return n_written


def main() -> None:
    argv = sys.argv[1:]
    work = work_dir(argv)
    source = work / "source"
    n_written = unpack(BUNDLE / "sources.tar.gz", source)
    print(f"sources: {n_written} files written to {source}", flush=True)
    options = [] if any(a == "--work" or a.startswith("--work=") for a in argv) else ["--work", str(work)]
    if not any(a == "--out" or a.startswith("--out=") for a in argv):
        options += ["--out", str(work / "results")]
    os.environ["PYSPAC_GPU_BUNDLE"] = str(BUNDLE)
    script = str(source / "benchmarks" / "gpu" / "run.py")
    os.execv(sys.executable, [sys.executable, script, *options, *argv])


if __name__ == "__main__":
    main()
