"""Which cores to run on: `--cpu-range LO-HI` in, a set of cores out, and a process that stays on them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from pyspac.errors import ConfigError


def parse_cpu_range(text: str) -> set[int]:
    """The cores LO .. HI; ConfigError unless all of them are open to this process."""
    if sys.platform != "linux":
        raise ConfigError("--cpu-range", text, "nothing, as threads cannot be pinned on this system")
    match = re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3})", text)
    low, high = map(int, match.groups()) if match else (1, 0)
    if low > high:
        raise ConfigError("--cpu-range", text, "LO-HI, the first and the last core, such as 0-7")
    cpus, is_open = set(range(low, high + 1)), os.sched_getaffinity(0)
    if not cpus <= is_open:
        raise ConfigError(
            "--cpu-range",
            text,
            f"cores that are open to this process: {len(is_open)} from {min(is_open)} to {max(is_open)}",
        )
    return cpus


def default_n_threads(cpus: set[int] | None = None) -> int:
    """As llama.cpp: one per physical core; at most one per core of `cpus`."""
    n_cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return n_cores if cpus is None else min(n_cores, len(cpus))


@contextmanager
def kept_within(cpus: set[int]) -> Iterator[None]:
    """Keep this thread, and threads and processes that it starts meanwhile, on `cpus`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
