"""The tests that compute on a GPU, on the emulated one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.cuda_emulator.build import call
from tools.cuda_emulator.toolkit import ROOT

FAR_VRAM_MIB = "10240"  # for experts that lie 8 GiB apart; what is not touched takes no memory
TWO_DEVICES = "pytest, two GPUs"
DELAY_US = "100"  # of every job of a stream, at most: what is not ordered shall overtake


def run_tests(library: Path, build_dir: Path, memcheck: bool, jobs: int) -> int:
    """How many failed. The engine's test computes on every device, `pytest -m gpu` on the first."""
    environment = os.environ | {"GGML_BACKEND_PATH": str(library), "CUDA_EMULATOR_DELAY_US": DELAY_US}
    programs = build_dir / "tests"
    backend_ops = [str(programs / "test-backend-ops"), "test", "-b", "CUDA0"]
    tests = {
        "test-negative-ids": [str(programs / "test-negative-ids"), "CUDA0"],
        "test-custom-op": [str(programs / "test-custom-op"), "CUDA0"],
        "test-backend-ops": [*backend_ops, "-p", "skip=1"],
        "test-backend-ops CUSTOM": [*backend_ops, "-o", "CUSTOM"],
    }
    if memcheck:
        environment |= {"LD_PRELOAD": sanitizer_library(), "ASAN_OPTIONS": "detect_leaks=0"}
    else:
        tests["test-far-experts"] = [str(programs / "test-far-experts"), "CUDA0"]
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
        tests["pytest -m gpu"] = [*pytest, str(ROOT / "tests")]
        files = ("test_two_gpus.py", "test_auto_devices.py")
        tests[TWO_DEVICES] = [*pytest, *(str(ROOT / "tests" / "engine" / name) for name in files)]

    def run_test(name: str) -> bool:
        start = time.monotonic()
        machine = {"CUDA_EMULATOR_VRAM_MIB": FAR_VRAM_MIB} if name == "test-far-experts" else {}
        machine |= {"CUDA_EMULATOR_DEVICES": "2"} if name == TWO_DEVICES else {}
        done = subprocess.run(tests[name], env=environment | machine, capture_output=True, text=True)
        result = "FAILED" if done.returncode else "ok"
        print(f"  {result:6} {name}, {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode:
            print((done.stdout + done.stderr)[-4000:], file=sys.stderr)
        return done.returncode == 0

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run_test, tests)).count(False)


def sanitizer_library() -> str:
    return call([os.environ.get("CXX", "g++"), "-print-file-name=libasan.so"]).strip()
