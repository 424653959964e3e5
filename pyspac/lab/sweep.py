"""Many runs side by side: policies x capacities x draft lengths x machines in, one row per run out.

Every (capacity, K, machine) is also run by the oracle, so that each row can say which share of its speed it
reaches. Runs are independent: in which process each runs changes nothing but the time that all take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pyspac.lab.combos import find_setup
from pyspac.lab.job import Job, Replay, Row, run_job
from pyspac.lab.machine import Machine
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.spread import run_in_processes
from pyspac.lab.spread_dask import run_on_dask

# lossless and clairvoyant; the fastest one counts
ORACLES: Final = tuple(
    Setup(eviction="belady", prefetch=f"foresight:uses={uses}", miss=miss, label="oracle")
    for miss, uses in (("host", 1), ("host", 2), ("host", 3), ("fetch", 1), ("balance", 2))
)


def make_jobs(
    replays: Iterable[Replay],
    policies: Iterable[str],
    capacities: Iterable[str],
    machines: Iterable[Machine],
    base: Setup,
) -> list[Job]:
    """Return the product; ConfigError names an unknown policy."""
    names, machines, capacities = list(policies), list(machines), list(capacities)
    jobs = []
    for replay in replays:
        for machine in machines:
            for capacity in capacities:
                for name in names:
                    setup, k = find_setup(name, replace(base, capacity=capacity))
                    jobs.append(Job(replay if k is None else replace(replay, k=k), setup, machine))
    return jobs


def oracle_jobs(jobs: Iterable[Job], base: Setup) -> list[Job]:
    """Return the oracle's runs under the conditions of `jobs`, each once."""
    by_conditions = {job.conditions: job for job in jobs}
    return [
        Job(job.replay, replace(oracle, capacity=job.setup.capacity, seed=base.seed), job.machine)
        for job in by_conditions.values()
        for oracle in ORACLES
    ]


def run_with_oracle(
    jobs: list[Job],
    base: Setup,
    *,
    n_workers: int = 0,
    policy_files: tuple[Path, ...] = (),
    dask: str | None = None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Run jobs and oracles; return the jobs' rows, in order, each with `oracle_tps` and `oracle_share`.

    `n_workers`, `policy_files`, `dask`: as of `run_all`.
    """
    check_jobs(jobs)
    everything = [*jobs, *oracle_jobs(jobs, base)]
    rows: list[Row] = [{} for _ in everything]
    for n_done, (index, row) in enumerate(run_all(everything, n_workers, policy_files, dask), 1):
        rows[index] = row
        on_done(n_done, len(everything))
    best: dict[tuple[Any, ...], float] = {}
    for job, row in zip(everything[len(jobs) :], rows[len(jobs) :], strict=True):
        best[job.conditions] = max(best.get(job.conditions, 0.0), row["predicted_tps"])
    for job, row in zip(jobs, rows, strict=False):
        row["oracle_tps"] = best[job.conditions]
        row["oracle_share"] = row["predicted_tps"] / row["oracle_tps"]
    return rows[: len(jobs)]


def check_jobs(jobs: Iterable[Job]) -> None:
    """Raise ConfigError for a policy that a trace cannot feed, before the others have run."""
    for job in {(job.replay, job.setup.label or job.setup): job for job in jobs}.values():
        Run(job.replay.workload(), job.setup, job.machine)


def run_all(
    jobs: list[Job], n_workers: int = 0, policy_files: tuple[Path, ...] = (), dask: str | None = None
) -> Iterator[tuple[int, Row]]:
    """Yield (index, row) as runs end: on the workers of the Dask scheduler `dask`, or in processes here.

    One process, or few jobs, means this one.
    """
    if dask is not None:
        yield from run_on_dask(jobs, dask, policy_files)
        return
    n_workers = min(n_workers or os.cpu_count() or 1, len(jobs))
    if n_workers > 1 and len(jobs) > 4:
        yield from run_in_processes(jobs, n_workers, policy_files)
        return
    for index, job in enumerate(jobs):
        yield index, run_job(job)
