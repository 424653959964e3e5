"""Names the machine of a benchmark: nothing in, a flat dict out, to stand beside every measured number."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path

import psutil

import pyspac
from pyspac.server.child import run_to_end

REPOSITORY = Path(__file__).resolve().parents[2]  # of a clone; else the folder that packages are in
PIN_FILE = Path("cmake/pin.json")


def describe() -> dict[str, object]:
    """CPU, cores, memory, load, versions and date; `load_average` is that of other work, so call it first."""
    return {
        "cpu": cpu_model(),
        "n_cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "n_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "pyspac": pyspac.__version__,
        "pyspac_commit": commit(),
        "llama_cpp_pin": pin(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """The processor's marketing name, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Short commit of this checkout, with "-dirty" if files differ from it; "unknown" outside of one."""
    if not (REPOSITORY / PIN_FILE).is_file():  # installed: a repository around it is another project's
        return "unknown"
    argv = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = run_to_end("git", argv)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.exit_code == 0 else "unknown"


def pin() -> str:
    """Commit of llama.cpp that the build uses."""
    try:
        return str(json.loads((REPOSITORY / PIN_FILE).read_text())["llama_cpp"]["commit"][:9])
    except (OSError, KeyError, ValueError):
        return "unknown"


def one_line(machine: dict[str, object]) -> str:
    """For the head of a printed table."""
    return (
        f"{machine['cpu']}, {machine['n_cores']} cores ({machine['n_threads']} usable), "
        f"{machine['memory_gib']} GiB, load {machine['load_average']}; pyspac {machine['pyspac_commit']}, "
        f"llama.cpp {machine['llama_cpp_pin']}; {machine['date']}"
    )
