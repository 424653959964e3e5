"""Many runs side by side: policies x capacities x draft lengths x machines in, one row per run out.

Every (capacity, K, machine) is also run by the oracle, so that each row can say which share of its speed it
reaches. Runs are independent; worker processes share nothing but the trace's path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from pyspac.lab.combos import find_setup
from pyspac.lab.machine import Machine
from pyspac.lab.registry import load_file
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run, simulate
from pyspac.lab.workload import DEFAULT_ACCEPT, Phase, Workload, cached_workload

# lossless and clairvoyant; the fastest one counts
ORACLES: Final = tuple(
    Setup(eviction="belady", prefetch=f"foresight:uses={uses}", miss=miss, label="oracle")
    for miss, uses in (("host", 1), ("host", 2), ("host", 3), ("fetch", 1), ("balance", 2))
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a trace becomes steps."""

    source: str  # trace file
    k: int | None = None
    accept: float = DEFAULT_ACCEPT
    phase: Phase = "decode"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    replay: Replay
    setup: Setup
    machine: Machine

    @property
    def conditions(self) -> tuple[Any, ...]:
        """What a run has in common with its oracle."""
        return self.replay, self.setup.capacity, self.machine.name


def run_job(job: Job) -> Row:
    """Run one job in this process."""
    replay, workload = job.replay, _workload(job.replay)
    return {"trace": Path(replay.source).name, "model": workload.trace.geometry.model} | simulate(
        workload, job.setup, job.machine
    )


def _workload(replay: Replay) -> Workload:
    return cached_workload(replay.source, replay.k, replay.accept, replay.phase, replay.seed)


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
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """Run jobs and oracles; return the jobs' rows, in order, each with `oracle_tps` and `oracle_share`."""
    check_jobs(jobs)
    everything = [*jobs, *oracle_jobs(jobs, base)]
    rows: list[Row] = [{} for _ in everything]
    for n_done, (index, row) in enumerate(run_all(everything, n_workers, policy_files), 1):
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
        Run(_workload(job.replay), job.setup, job.machine)


def run_all(
    jobs: list[Job], n_workers: int = 0, policy_files: tuple[Path, ...] = ()
) -> Iterator[tuple[int, Row]]:
    """Yield (index, row) as runs end; one worker, or few jobs, stay in this process."""
    n_workers = min(n_workers or os.cpu_count() or 1, len(jobs))
    if n_workers == 1 or len(jobs) <= 4:
        for index, job in enumerate(jobs):
            yield index, run_job(job)
        return
    with ProcessPoolExecutor(n_workers, get_context("spawn"), _start_worker, (policy_files,)) as pool:
        futures = {pool.submit(run_job, job): index for index, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker(policy_files: tuple[Path, ...]) -> None:
    for path in policy_files:
        load_file(path)
