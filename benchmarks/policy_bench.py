"""Rows of the runs that docs/policies.md shows: which runs are wanted, their means, and Markdown of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from pyspac.lab.combos import find_setup
from pyspac.lab.job import Job, Replay
from pyspac.lab.machine import PRESETS
from pyspac.lab.report import is_assumed
from pyspac.lab.setup import Setup
from pyspac.lab.sweep import ORACLES

Row = dict[str, Any]

QWEN, GEMMA, DEMO = "Qwen3", "Gemma-4", "the demo model"
FILES: Final = {QWEN: "qwen.route.csv", GEMMA: "gemma.route.csv"}  # in the folder --traces
ACCEPTS: Final = (
    0.5,
    0.7,
    0.8,
    0.9,
    0.97,
)  # of emulated drafts, from what a poor drafter reaches to SP-MoE's
MACHINE: Final = "rtx4090"
N_FIRST: Final = 16  # tokens of coverage_first


@dataclass
class Bench:
    """Gives rows of runs. `results` is None while the runs are collected in `wanted`."""

    traces: dict[str, Path]
    results: dict[Job, Row] | None = None
    wanted: dict[Job, None] = field(default_factory=dict)  # a set that keeps its order
    seen: list[Row] = field(default_factory=list)  # rows of the present section

    def row(self, trace: str, policy: str, capacity: str, k: int | None, **options: Any) -> Row:
        """Return one policy's run; `options`: `machine`, `accept`, or fields of Setup."""
        if policy == "oracle":
            found = [self._row(trace, setup, capacity, k, **options) for setup in ORACLES]
            return max(found, key=lambda row: float(row["predicted_tps"]))
        setup, forced_k = find_setup(policy, Setup())
        return self._row(trace, setup, capacity, k if forced_k is None else forced_k, **options)

    def grid(self, trace: str, policy: str, capacity: str, k: int, **options: Any) -> list[Row]:
        """Return a row for each of ACCEPTS; one row without drafts, to which they are all the same."""
        accepts = ACCEPTS if k else ACCEPTS[:1]
        return [self.row(trace, policy, capacity, k, accept=accept, **options) for accept in accepts]

    def _row(
        self,
        trace: str,
        setup: Setup,
        capacity: str,
        k: int | None,
        machine: str = MACHINE,
        accept: float = ACCEPTS[0],
        **fields: Any,
    ) -> Row:
        setup = replace(setup, capacity=capacity, n_first=N_FIRST, **fields)
        accept = accept if k else ACCEPTS[0]  # one run, and one entry of the cache, where nothing is drafted
        replay = Replay(source=str(self.traces[trace]), k=k, accept=accept)
        row = self._one(Job(replay, setup, PRESETS[machine])).copy()
        row.update(trace_name=trace, accept=accept, asked_k=k)
        self.seen.append(row)
        return row

    def _one(self, job: Job) -> Row:
        if self.results is not None:
            return self.results[job]
        self.wanted[job] = None
        return defaultdict(lambda: 1.0, policy=job.setup.label, predictor=None, machine=job.machine.name)

    def made_of(self) -> str:
        """Say what of the section's rows was replayed, emulated, predicted and assumed."""
        traces = ", ".join(dict.fromkeys(row["trace_name"] for row in self.seen))
        machines = ", ".join(f"`{name}`" for name in dict.fromkeys(row["machine"] for row in self.seen))
        parts = [f"Replayed: {traces}."]
        if accepts := sorted({row["accept"] for row in self.seen if row["asked_k"]}):
            parts.append(f"Emulated: drafts, {'/'.join(f'{accept:g}' for accept in accepts)} accepted.")
        parts.append(f"Predicted: {machines}.")
        if any(is_assumed(row) for row in self.seen):
            parts.append("Assumed: marked guesses.")
        return "\n".join(wrap(" ".join(parts), 118))


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    head, *rest = ("| " + " | ".join(row) + " |" for row in [header, *lines])
    return "\n".join([head, "|---" * len(header) + "|", *rest])


def share_and_speed(row: Row) -> str:
    """Return covered activations/GB moved/predicted tokens per second."""
    return f"{row['coverage']:.2f}/{row['bytes_moved'] / 1e9:.1f}/{row['predicted_tps']:.0f}"


def tps(row: Row) -> str:
    speed = row["predicted_tps"]
    return f"{speed:.1f}" if speed < 30 else f"{speed:.0f}"


def shown_name(name: str, row: Row) -> str:
    """Return a policy's name for a table, with what was assumed beside it."""
    return f"{name}, {row['predictor']}" if is_assumed(row) else name


def percent(capacity: str) -> str:
    return capacity.replace("%", " %")
