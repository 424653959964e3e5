"""How many threads suit a set of cores, and a process that stays on them (`--cpu-range`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


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
