"""Small file systems that only this program sees: a mount namespace of its own, where that is allowed.

In it /dev/shm, or any folder, can be filled to the last byte and harms no one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_INSIDE: Final = "PYSPAC_SOAK_NAMESPACE"  # set in the environment of a program that is in one
SHM: Final = Path("/dev/shm")


def unshare() -> list[str]:
    """util-linux's program, before another one; a user who is not root needs a user namespace as well."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount"]


def _mount(folder: Path, n_mib: int) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", f"size={n_mib}m,mode=1777", "tmpfs", str(folder)]


def is_allowed() -> bool:
    """Whether this machine lets us mount in a namespace of our own."""
    try:
        return subprocess.run([*unshare(), *_mount(SHM, 1)], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def is_inside() -> bool:
    """Whether this program was started by `enter`."""
    return _INSIDE in os.environ


def enter(argv: list[str]) -> None:
    """Start this program again with `argv` in a namespace of its own; returns only if that is not allowed."""
    if not is_inside() and is_allowed():
        os.environ[_INSIDE] = "1"
        os.execvp("unshare", [*unshare(), sys.executable, *argv])


@contextmanager
def mounted(folder: Path, n_mib: int) -> Iterator[Path | None]:
    """An empty file system of `n_mib` MiB at `folder`; None outside of a namespace."""
    if not is_inside():
        yield None
        return
    subprocess.run(_mount(folder, n_mib), check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
