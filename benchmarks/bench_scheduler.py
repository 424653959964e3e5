"""Microseconds per scheduler step, and the balancer's cost against the number of experts. No model needed.

A synthetic router (Zipf over experts, drifting slowly) drives a LocalBoard; an idealised engine makes planned
loads resident at once. Prints a table, or with --json one object per line:

    python benchmarks/bench_scheduler.py --steps 300 --repeats 5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from pyspac.engine.board import BoardGeometry, LocalBoard, Residency
from pyspac.scheduler.config import ESTIMATORS, SchedulerConfig
from pyspac.scheduler.scheduler import Scheduler

SHAPES = {"48x128": (48, 128, 8), "61x384": (61, 384, 8)}  # n_layer, n_expert, n_expert_used
BUDGET_US = {"48x128": 200.0, "61x384": 1000.0}
N_TOKENS = 9  # per step: eight drafted and one sampled
CACHE_SHARE = 0.17  # of all experts, as in MoE-SpAc 4.1


def machine() -> str:
    """Return the processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def make_counts(rng: np.random.Generator, shape: tuple[int, int, int], n_steps: int) -> np.ndarray:
    """Return counts [n_steps, n_layer, n_expert] uint32 of N_TOKENS tokens per step."""
    n_layer, n_expert, n_used = shape
    weight = np.log(1.0 / np.arange(1, n_expert + 1) ** 0.8)
    logits = np.stack([rng.permutation(weight) for _ in range(n_layer)])
    counts = np.zeros((n_steps, n_layer, n_expert), np.uint32)
    layers = np.arange(n_layer)[:, None]
    for step in range(n_steps):
        logits += 0.05 * rng.standard_normal(logits.shape)
        for _ in range(N_TOKENS):
            chosen = np.argpartition(-(logits + rng.gumbel(size=logits.shape)), n_used, axis=1)[:, :n_used]
            counts[step, layers, chosen] += 1
    return counts


class Bench:
    """One scheduler on one board, driven by one sequence of counts."""

    def __init__(self, shape: tuple[int, int, int], config: SchedulerConfig, counts: np.ndarray) -> None:
        n_layer, n_expert, n_used = shape
        self.board = LocalBoard(
            BoardGeometry.uniform(
                n_layer=n_layer, n_expert=n_expert, n_expert_used=n_used,
                n_slots=int(CACHE_SHARE * n_layer * n_expert),
            )
        )  # fmt: skip
        self.counts = counts
        self.scheduler = Scheduler(self.board, config)

    def engine_step(self, counts: np.ndarray) -> None:
        """Add counts, layer times and counters; make the planned loads resident, evicting below tau."""
        board = self.board
        is_ready = board.residency == Residency.RESIDENT
        used = counts > 0
        n_host = np.count_nonzero(used & ~is_ready, axis=1)
        board.counts[:] += counts
        stats = board.layer_stats
        stats["n_calls"] += np.uint64(1)
        stats["n_host_experts"] += n_host.astype(np.uint64)
        stats["n_host_rows"] += (counts * ~is_ready).sum(axis=1).astype(np.uint64)
        stats["n_device_experts"] += np.count_nonzero(used & is_ready, axis=1).astype(np.uint64)
        stats["host_us"] += (100 * n_host).astype(np.uint64)
        stats["layer_us"] += (100 * n_host + 60).astype(np.uint64)
        board.counters["n_forward"] += np.uint64(1)
        self._load()

    def _load(self) -> None:
        board = self.board
        load = board.load[: int(board.n_load[0])]
        residency = board.residency.ravel()
        is_cold = board.utility < board.tau[:, None]
        n_over = np.count_nonzero(residency) + len(load) - board.n_slots
        if n_over > 0:
            victims = np.flatnonzero((residency > 0) & is_cold.ravel())
            victims = victims[np.argsort(board.utility.ravel()[victims], kind="stable")]
            residency[victims[:n_over]] = Residency.ABSENT
        residency[load] = Residency.RESIDENT
        board.counters["loaded_bytes"] += np.uint64(len(load) << 20)
        board.counters["load_us"] += np.uint64(len(load) * 40)

    def run(self) -> list[float]:
        """Return microseconds of every step after the first tenth."""
        times = []
        for counts in self.counts:
            self.engine_step(counts)
            start = perf_counter_ns()
            self.scheduler.step()
            times.append((perf_counter_ns() - start) / 1e3)
        return times[len(times) // 10 :]


def bench_steps(args: argparse.Namespace, emit: Callable[[dict[str, Any]], None]) -> None:
    """Time whole steps for every shape and estimator; repeats are interleaved."""
    rng = np.random.default_rng(args.seed)
    for name, shape in SHAPES.items():
        counts = make_counts(rng, shape, args.steps)
        estimators = args.estimator or ["ema"]
        medians: dict[str, list[float]] = {e: [] for e in estimators}
        # three steps of four learn nothing: the median is one of those
        means: dict[str, list[float]] = {e: [] for e in estimators}
        tails: dict[str, list[float]] = {e: [] for e in estimators}
        for _ in range(args.repeats):
            for estimator in estimators:
                times = Bench(shape, SchedulerConfig(estimator=estimator), counts).run()
                medians[estimator].append(statistics.median(times))
                means[estimator].append(statistics.mean(times))
                tails[estimator].append(float(np.percentile(times, 99)))
        for estimator in estimators:
            emit(
                {
                    "bench": "step", "shape": name, "estimator": estimator,
                    "median_us": statistics.median(medians[estimator]),
                    "median_us_min": min(medians[estimator]), "median_us_max": max(medians[estimator]),
                    "mean_us": statistics.median(means[estimator]),
                    "p99_us": statistics.median(tails[estimator]), "budget_us": BUDGET_US[name],
                }
            )  # fmt: skip


def bench_balancer(args: argparse.Namespace, emit: Callable[[dict[str, Any]], None]) -> None:
    """Time the balancer against the number of experts: the tables by level, and the solution by itself."""
    for n_expert in (64, 128, 256, 512):
        shape = (48, n_expert, 8)
        counts = make_counts(np.random.default_rng(args.seed), shape, 40)
        bench = Bench(shape, SchedulerConfig(estimator="ema"), counts)
        bench.run()
        balancer, cost = bench.scheduler.balancer, bench.scheduler.cost
        cost.is_host_measured[:] = cost.is_device_measured[:] = True  # the costlier path: eq. 9 to 12
        slots = bench.scheduler.slots.read(bench.board.residency)
        absent_hot = balancer.absent_hot(slots)
        emit(
            {
                "bench": "balancer", "n_layer": shape[0], "n_expert": n_expert,
                "tables_us": _median_us(balancer.tables.place, bench.board.utility),
                "solve_us": _median_us(balancer.solve_tables, absent_hot),
            }
        )  # fmt: skip


def _median_us(call: Callable[..., object], *args: object) -> float:
    times = []
    for _ in range(200):
        start = perf_counter_ns()
        call(*args)
        times.append((perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def main() -> None:
    """Parse arguments, run both parts, print rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200, help="steps per repeat (default 200)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, interleaved (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic router (default 0)")
    parser.add_argument(
        "--estimator", action="append", choices=ESTIMATORS, help="may be given again (default ema)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    where = machine()

    def emit(row: dict[str, Any]) -> None:
        row = {**row, "machine": where}
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            cells = (f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            print("  ".join(cells), flush=True)

    bench_steps(args, emit)
    bench_balancer(args, emit)


if __name__ == "__main__":
    main()
