"""Phase `tests`: the engine's tests, compute-sanitizer on the patched kernels, logits against stock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import synthetic
from logits import compare as compare_logits
from settings import Settings

from pyspac import _native
from pyspac.engine.devices import choose_device

ON_DEVICE = ("test-negative-ids", "test-custom-op")  # first: they compute on every device
SMALL = ("small", 2)  # shape and layers of the model for logits
TEST_LIMIT_S = 240.0
SANITIZER_LIMIT_S = 150.0
SANITIZERS = ("memcheck", "racecheck")
SANITIZER_TYPES = ("f16", "q4_K")  # between them, every kind of kernel
SANITIZER_FOLDERS = (
    "/usr/local/cuda/bin",
    "/usr/local/cuda/compute-sanitizer",
    "/opt/nvidia/compute-sanitizer",
)


def run(s: Settings, left_s: float) -> dict[str, Any]:
    """Rows of all tests and what was skipped; `failed` names those that failed."""
    end = time.monotonic() + left_s
    rows: list[dict[str, Any]] = []
    skipped: list[list[str]] = []

    def left() -> float:
        return end - time.monotonic()

    programs = test_programs(s, skipped)
    rows.append(logits_row(s))
    rows += engine_rows([p for p in programs if p.name in ON_DEVICE], left, skipped)
    rows += sanitizer_rows(s, left, skipped)
    rows += engine_rows([p for p in programs if p.name not in ON_DEVICE], left, skipped)
    failed = [row["name"] for row in rows if not row["ok"]]
    result = f"{len(rows) - len(failed)} of {len(rows)} passed" + (
        f", FAILED: {', '.join(failed)}" if failed else ""
    )
    return {"result": result, "rows": rows, "skipped": skipped, "failed": failed}


def logits_row(s: Settings) -> dict[str, Any]:
    path = synthetic.model_path(Path(s.work), *SMALL)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Settings(like=SMALL[0], layers=SMALL[1], work=s.work)
        synthetic.make_model(path, small, SMALL[1], psutil.cpu_count() or 1)
    n_threads = s.threads or psutil.cpu_count(logical=False) or 1
    return {"name": "logits", **compare_logits(path, choose_device(s.device, s.rpc), n_threads, say)}


def test_programs(s: Settings, skipped: list[list[str]]) -> list[Path]:
    folder = tests_folder(s)
    programs = sorted(folder.glob("test-*")) if folder.is_dir() else []
    if not programs:
        skipped.append(["engine tests", f"none in {folder} (target engine-tests)"])
    return programs


def engine_rows(
    programs: list[Path], left: Callable[[], float], skipped: list[list[str]]
) -> list[dict[str, Any]]:
    """One row for each program that there is time for."""
    rows = []
    for program in programs:
        if left() < 5:
            skipped.append([program.name, "the time is over"])
            continue
        rows.append(run_program([str(program)], program.name, min(left(), TEST_LIMIT_S)))
    return rows


def sanitizer_rows(s: Settings, left: Callable[[], float], skipped: list[list[str]]) -> list[dict[str, Any]]:
    program = tests_folder(s) / "test-negative-ids"
    tool = find_sanitizer()
    why = None
    if not s.sanitizer:
        why = "--no-sanitizer"
    elif choose_device(s.device, s.rpc).is_cpu:
        why = "the device is the CPU"
    elif tool is None:
        why = "no compute-sanitizer on this machine"
    elif not program.is_file():
        why = f"{program} is not built"
    if why or tool is None:
        skipped.append(["compute-sanitizer", why or ""])
        return []
    rows = []
    for name in SANITIZERS:
        if left() < 20:
            skipped.append([f"compute-sanitizer {name}", "the time is over"])
            continue
        command = [tool, "--tool", name, "--error-exitcode", "86", "--print-limit", "5"]
        command += [str(program), choose_device(s.device, s.rpc).name, *SANITIZER_TYPES]
        row = run_program(command, f"sanitizer-{name}", min(left(), SANITIZER_LIMIT_S))
        if row["timed_out"]:
            skipped.append(
                [
                    f"the rest of compute-sanitizer {name}",
                    f"{row['seconds']} s were over; no error until then",
                ]
            )
            row["ok"] = "ERROR SUMMARY" not in row["tail"] and "=========" not in row["tail"].replace(
                "========= COMPUTE-SANITIZER", ""
            )
        rows.append(row)
    return rows


def find_sanitizer() -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *SANITIZER_FOLDERS])
    return shutil.which("compute-sanitizer", path=path)


def tests_folder(s: Settings) -> Path:
    return _native.lib_dir().parent / "tests" if s.no_build else s.cmake_dir / "tests"


def run_program(command: list[str], name: str, limit_s: float) -> dict[str, Any]:
    """Run it; its last lines are kept, and shown if it failed."""
    start = time.monotonic()
    timed_out = False
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        timed_out, code = True, -1
        text = (
            error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else (error.stdout or "")
        )
    seconds = round(time.monotonic() - start, 1)
    tail = "\n".join(text.strip().splitlines()[-12:])
    say(f"{name:24} {'timed out' if timed_out else 'ok' if code == 0 else f'FAILED ({code})'}  {seconds} s")
    if code != 0:
        print(tail, file=sys.stderr, flush=True)
    return {
        "row": "test",
        "name": name,
        "ok": code == 0,
        "code": code,
        "timed_out": timed_out,
        "seconds": seconds,
        "tail": tail if code != 0 else "",
    }


def say(text: str) -> None:
    print(f"    {text}", flush=True)
