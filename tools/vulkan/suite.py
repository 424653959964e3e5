"""The tests that compute on a Vulkan device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def run_tests(build_dir: Path, root: Path, variables: dict[str, str]) -> int:
    """How many failed; one after the other, as each has a thread per core already."""
    programs = build_dir / "tests"
    tests = {
        "test-negative-ids": [str(programs / "test-negative-ids"), "Vulkan0"],
        "test-backend-ops": [str(programs / "test-backend-ops"), "test", "-b", "Vulkan0", "-p", "skip=1"],
        "test-copies": [str(programs / "test-copies"), "Vulkan0"],
        "pytest -m vulkan": [sys.executable, "-m", "pytest", "-q", "-m", "vulkan", str(root / "tests")],
    }
    n_failed = 0
    for name, command in tests.items():
        start = time.monotonic()
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        print(
            f"  {'FAILED' if done.returncode else 'ok':6} {name}, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if done.returncode:
            print((done.stdout + done.stderr)[-4000:], file=sys.stderr)
            n_failed += 1
    return n_failed
