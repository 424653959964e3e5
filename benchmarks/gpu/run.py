#!/usr/bin/env python3
"""One command on a CUDA machine: build, test, make a model, measure, compare; JSON rows and a table out.

Every phase has a share of --budget and says what it skipped. The phases after `build` run in processes of
their own (worker.py). Standard library only, until the wheels that came with a bundle are unpacked.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import builder
import table
from progress import Progress
from settings import HERE, REPOSITORY, Settings, parse
from wheels import unpack_wheels

# at most so many seconds of what is left, unless nothing follows; and so many are needed to begin
LIMIT_S = {
    "build": 480.0,
    "tests": 200.0,
    "model": 120.0,
    "measure": 40.0,
    "timeline": 60.0,
    "compare": 3600.0,
}
NEEDED_S = {"build": 10.0, "tests": 10.0, "model": 5.0, "measure": 5.0, "timeline": 20.0, "compare": 20.0}
GRACE_S = 8.0  # for a phase to end by itself
GPU_FIELDS = (
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "clocks.max.sm",
)


def bundle_dir() -> Path | None:
    """The folder that bundle.py made, if this run came out of one."""
    named = os.environ.get("PYSPAC_GPU_BUNDLE")
    return Path(named) if named else None


def prepare_environment(s: Settings) -> None:
    """Packages of the bundle, our own modules and the build, for this process and its children."""
    folders = [str(REPOSITORY), str(HERE), str(HERE.parent)]
    bundle = bundle_dir()
    if bundle and (bundle / "wheels").is_dir():
        site = Path(s.work) / f"site-{sys.version_info.major}.{sys.version_info.minor}"
        unpack_wheels(bundle / "wheels", site)
        folders.append(str(site))
        for programs in (site / "bin", site / "cmake" / "data" / "bin"):
            os.environ["PATH"] += os.pathsep + str(programs)
    if not s.no_build:
        os.environ["PYSPAC_BUILD_DIR"] = str(s.cmake_dir)
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )


# ---- phases --------------------------------------------------------------------------------------


def limit_of(phase: str, s: Settings, progress: Progress) -> float:
    """Seconds for a phase; the last one gets all that is left."""
    return progress.left_s if phase == s.phases[-1] else min(LIMIT_S[phase], progress.left_s)


def run_build(s: Settings, progress: Progress) -> bool:
    if s.no_build:
        progress.skip("build", "--no-build")
        return True
    start = time.monotonic()
    try:
        result = builder.run(s, limit_of("build", s, progress), progress.say)
    except builder.BuildError as error:
        progress.finish("build", time.monotonic() - start, f"FAILED: {error}")
        return False
    progress.finish("build", time.monotonic() - start, result)
    return True


def run_worker(
    phase: str, s: Settings, progress: Progress, model: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows, the phase's own result); what a phase wrote before it failed counts."""
    limit = limit_of(phase, s, progress)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.jsonl"
        code = call(
            [sys.executable, str(HERE / "worker.py"), phase, s.to_json(), str(limit), model, str(file)],
            limit + GRACE_S,
        )
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    rows = [line for line in lines if "result" not in line]
    result = next((line for line in lines if "result" in line), None)
    if result is None:
        why = "the time is over" if code is None else f"ended with code {code}"
        result = {"result": f"FAILED: {why}", "failed": [phase]}
    progress.finish(phase, time.monotonic() - start, result["result"])
    for what, why in result.get("skipped", []):
        progress.skip(what, why)
    return rows, result


def call(command: list[str], limit_s: float) -> int | None:
    """The exit code; None: it was ended because the time was over."""
    environment = os.environ | with_libraries()
    process = subprocess.Popen(command, env=environment, process_group=0)
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def with_libraries() -> dict[str, str]:
    folders = builder.library_folders(Path(os.environ.get("PYSPAC_BUILD_DIR", ".")))
    if not folders:
        return {}
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([*folders, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(
            os.pathsep
        )
    }


def run_phases(s: Settings, progress: Progress) -> tuple[list[dict[str, Any]], bool]:
    """Rows of all phases, and whether everything that ran passed."""
    rows: list[dict[str, Any]] = []
    ok, model = True, s.model or ""
    for phase in s.phases:
        if progress.left_s < NEEDED_S[phase]:
            progress.skip(phase, "the time is over")
            continue
        progress.say(f"--- {phase}")
        if phase == "build":
            if not run_build(s, progress):
                ok = False
                for other in s.phases[s.phases.index("build") + 1 :]:
                    progress.skip(other, "there is no build")
                break
            continue
        if phase in ("timeline", "compare") and not model:
            model = kept_model(s)
            if not model:
                progress.skip(phase, "no model: the phase `model` makes one, or name one with --model")
                continue
        found, result = run_worker(phase, s, progress, model)
        model = result.get("path", model)
        ok = ok and not result.get("failed")
        rows += found
    return rows, ok


def kept_model(s: Settings) -> str:
    """The synthetic model that an earlier command left: with --layers as asked for, else the largest."""
    pattern = f"{s.like}-{s.layers or '*'}-layers.gguf"
    found = sorted(Path(s.work).glob(pattern), key=lambda path: path.stat().st_size)
    return str(found[-1]) if found else ""


# ---- what comes out ------------------------------------------------------------------------------


def gpu_info() -> dict[str, str] | None:
    """Name, driver and link of the first GPU; None without one."""
    if not builder.has_gpu():
        return None
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=60)
    values = listed.stdout.splitlines()[0].split(", ") if listed.returncode == 0 and listed.stdout else []
    return dict(zip(GPU_FIELDS, values, strict=False)) or None


def describe_run(s: Settings) -> dict[str, Any]:
    """Machine, GPU, commit, date and settings, to stand in every row."""
    import machine

    described = machine.describe()
    bundle = bundle_dir()
    if bundle and (bundle / "bundle.json").is_file():
        described["pyspac_commit"] = json.loads((bundle / "bundle.json").read_text())["commit"]
    settings = json.loads(s.to_json())
    for name in ("work", "out", "build_dir", "model", "phases"):
        settings.pop(name)  # folders of one machine say nothing on another
    return {"machine": described, "gpu": gpu_info(), "settings": settings}


def write_rows(s: Settings, rows: list[dict[str, Any]], described: dict[str, Any]) -> Path | None:
    """One file per run, named by its date; none without rows."""
    if not rows:
        return None
    out = s.out_folder(is_real=described["gpu"] is not None and s.device != "cpu")
    out.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = out / f"gpu-{stamp}.jsonl"
    path.write_text("".join(json.dumps({"bench": "gpu", **row, **described}) + "\n" for row in rows))
    return path


def print_report(
    rows: list[dict[str, Any]], described: dict[str, Any], progress: Progress, path: Path | None
) -> None:
    import machine

    gpu = described["gpu"]
    gpu_text = f"{gpu['name']}, driver {gpu['driver_version']}" if gpu else "none"
    print(f"\n{machine.one_line(described['machine'])}\nGPU: {gpu_text}")
    for line in table.comparison([row for row in rows if row.get("row") == "compare"]):
        print(line)
    print("phases:")
    for line in progress.summary():
        print(line)
    print(f"rows: {path} ({len(rows)})" if path else "rows: none", flush=True)


def main(argv: list[str] | None = None) -> int:
    s = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the phase that is running as well
    progress = Progress(s.budget_s)
    prepare_environment(s)
    try:
        described = describe_run(s)
    except ModuleNotFoundError as error:
        print(
            f"run.py: no Python package {error.name}: run it from a bundle, or in the checkout's .venv",
            file=sys.stderr,
        )
        return 2
    rows, ok = run_phases(s, progress)
    path = write_rows(s, rows, described)
    print_report(rows, described, progress, path)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
