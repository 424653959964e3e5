"""One run of a sweep: what is replayed, under which policies, on which machine in; one row out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspac.lab.machine import Machine
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import simulate
from pyspac.lab.workload import DEFAULT_ACCEPT, Phase, Workload, cached_workload

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a trace becomes steps."""

    source: str  # trace file
    k: int | None = None
    accept: float = DEFAULT_ACCEPT
    phase: Phase = "decode"
    seed: int = 0

    def workload(self) -> Workload:
        """The steps, read and made once per process. Raises TraceError."""
        return cached_workload(self.source, self.k, self.accept, self.phase, self.seed)


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

    def __str__(self) -> str:
        """For people: "lru at 10% on rtx4090"."""
        drafts = "" if self.replay.k is None else f", k={self.replay.k}"
        name = self.setup.label or self.setup.eviction
        return f"{name} at {self.setup.capacity} on {self.machine.name}{drafts}"


def run_job(job: Job) -> Row:
    """Run one job in this process."""
    replay, workload = job.replay, job.replay.workload()
    return {"trace": Path(replay.source).name, "model": workload.trace.geometry.model} | simulate(
        workload, job.setup, job.machine
    )
