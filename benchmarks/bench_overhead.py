#!/usr/bin/env python3
"""What the engine costs on the CPU: tokens per second and memory, beside the same build without an engine.

Four ways to decode the same tokens take turns, round by round, in one process:

    stock      no engine, weights in the file's layout
    none       engine attached, no expert resident: every expert takes the host path
    all        engine attached, every expert resident: every expert takes the device path (the CPU, emulated)
    repacked   no engine, weights repacked for this CPU: llama.cpp's default, which the engine does not have

A speed ratio is the median over rounds of (stock's time / this one's time in the same round).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import machine
import numpy as np
import psutil

from pyspac.engine.board import NO_BUDGET, Residency
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import LOAD_MODE_NONE, Model, ModelParams

N_PROMPT = 32  # tokens in the cache before the first timed step
N_CTX = 512
WAIT_MS = 120_000
MIN_RATIO = 0.95
MAX_EXTRA_MIB = 100.0
FIRST_TOKEN = 300  # the synthetic vocabulary's words begin at 259

Clock = Callable[[], float]  # seconds
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to decode; `extra_mib` is the engine's memory beyond its pool, if it has an engine."""

    name: str
    ctx: Context
    pool_mib: float = 0.0
    extra_mib: float | None = None


# ---- the contenders ------------------------------------------------------------------------------


def rss_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


def load_model(path: Path, repacked: bool) -> Model:
    """Into memory rather than mapped, so that the resident set does not depend on what was touched."""
    return Model(ModelParams(path=path, use_extra_bufts=repacked, load_mode=LOAD_MODE_NONE))


def new_context(model: Model, n_threads: int, widths: list[int]) -> Context:
    n = max(widths)
    ctx = Context(
        model, ContextParams(n_ctx=N_CTX, n_ubatch=max(n, N_PROMPT), n_outputs_max=n, n_threads=n_threads)
    )
    warm_up(ctx, widths)
    return ctx


def warm_up(ctx: Context, widths: list[int]) -> None:
    """Allocate every graph that will be timed."""
    ctx.clear()
    for width in widths:
        for _ in range(2):
            ctx.decode([FIRST_TOKEN] * width, width)


@contextlib.contextmanager
def engine_contender(
    name: str, model: Model, cache: str, n_threads: int, widths: list[int]
) -> Iterator[Contender]:
    """A context with an engine whose experts are all resident (cache "100%") or all absent."""
    ctx = new_context(model, n_threads, widths)
    assert ctx.ptr is not None
    before = rss_mib()
    engine = Engine.attach(
        ctx.ptr, EngineParams(device="cpu", cache=cache, max_batch=max(16, *widths), fill=False)
    )
    try:
        decide(engine, want_all=name == "all")
        warm_up(ctx, widths)
        pool_mib = engine.info().pool_bytes / 2**20
        yield Contender(name, ctx, pool_mib, rss_mib() - before - pool_mib)
    finally:
        engine.close()
        ctx.close()


def decide(engine: Engine, want_all: bool) -> None:
    """Make every expert resident, or none; raises RuntimeError if that did not happen."""
    board = engine.board
    is_split = np.repeat(board.expert_bytes > 0, board.n_expert)  # [n_layer * n_expert]
    keys = np.flatnonzero(is_split).astype(np.uint32) if want_all else np.empty(0, np.uint32)
    with board.decision():
        board.utility[:] = 1
        board.tau[:] = 1 if want_all else 255
        board.load[: len(keys)] = keys
        board.n_load[0] = len(keys)
        board.byte_budget[0] = NO_BUDGET
    engine.apply()
    engine.wait_idle(WAIT_MS)
    n_resident = int(np.count_nonzero(board.residency == Residency.RESIDENT))
    if n_resident != len(keys):
        raise RuntimeError(f"{n_resident} experts are resident instead of {len(keys)}")


# ---- timing --------------------------------------------------------------------------------------


def timed_round(ctx: Context, width: int, n_steps: int, first_token: int, clock: Clock) -> float:
    """Milliseconds per step of `width` tokens, over `n_steps` steps after a short prompt."""
    ctx.clear()
    ctx.decode(range(first_token - N_PROMPT, first_token), 1)
    start = clock()
    for step in range(n_steps):
        first = first_token + step * width
        ctx.decode(range(first, first + width), width)
    return (clock() - start) * 1000 / n_steps


def interleave(
    contenders: list[Contender], widths: list[int], n_rounds: int, n_steps: int, n_vocab: int, clock: Clock
) -> dict[tuple[str, int], list[float]]:
    """Milliseconds per step: {(contender, width): [n_rounds]}; the order of contenders rotates."""
    times: dict[tuple[str, int], list[float]] = {(c.name, width): [] for c in contenders for width in widths}
    rng = np.random.default_rng(0)
    for i_round in range(n_rounds):
        for width in widths:
            first = int(rng.integers(FIRST_TOKEN + N_PROMPT, n_vocab - n_steps * width))
            for i in range(len(contenders)):
                contender = contenders[(i + i_round) % len(contenders)]
                times[contender.name, width].append(timed_round(contender.ctx, width, n_steps, first, clock))
        print(f"\rround {i_round + 1}/{n_rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times


def summarise(
    contenders: list[Contender], times: dict[tuple[str, int], list[float]]
) -> list[dict[str, object]]:
    """One row per contender and width."""
    rows: list[dict[str, object]] = []
    by_name = {contender.name: contender for contender in contenders}
    for (name, width), values in times.items():
        ratios = np.array(times["stock", width]) / np.array(values)
        low, median, high = np.percentile(values, [10, 50, 90])
        contender = by_name[name]
        rows.append({
            "bench": "overhead", "contender": name, "width": width, "n_rounds": len(values),
            "step_ms_median": round(median, 3), "step_ms_p10": round(low, 3), "step_ms_p90": round(high, 3),
            "tps": round(width * 1000 / median, 1), "ratio_median": round(float(np.median(ratios)), 4),
            "ratio_p10": round(float(np.percentile(ratios, 10)), 4),
            "ratio_p90": round(float(np.percentile(ratios, 90)), 4),
            "pool_mib": round(contender.pool_mib, 1),
            "extra_mib": None if contender.extra_mib is None else round(contender.extra_mib, 1),
        })  # fmt: skip
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    head = f"{'':9} {'tokens':>6} {'ms/step':>8} {'p10':>8} {'p90':>8} {'tokens/s':>9}"
    print(f"{head} {'speed/stock':>12} {'p10..p90':>14}")
    for row in sorted(rows, key=lambda row: int(str(row["width"]))):
        spread = f"{row['ratio_p10']:.3f}..{row['ratio_p90']:.3f}"
        print(
            f"{row['contender']:9} {row['width']:6} {row['step_ms_median']:8.2f} {row['step_ms_p10']:8.2f} "
            f"{row['step_ms_p90']:8.2f} {row['tps']:9.1f} {row['ratio_median']:12.3f} {spread:>14}"
        )
    for name, (pool, extra) in {r["contender"]: (r["pool_mib"], r["extra_mib"]) for r in rows}.items():
        if extra is not None:
            print(f"memory of engine {name!r}: pool {pool:.1f} MiB + {extra:.1f} MiB")


def failures(rows: list[dict[str, object]]) -> list[str]:
    """What breaks the promise: at least 0.95 of stock's speed, pool + 100 MiB of memory."""
    engines = [row for row in rows if row["extra_mib"] is not None]
    slow = [
        f"{row['contender']}, width {row['width']}: {row['ratio_median']} of stock's speed, below {MIN_RATIO}"
        for row in engines
        if float(str(row["ratio_median"])) < MIN_RATIO
    ]
    fat = {
        f"{row['contender']}: {row['extra_mib']} MiB beyond the pool, above {MAX_EXTRA_MIB:.0f}"
        for row in engines
        if float(str(row["extra_mib"])) > MAX_EXTRA_MIB
    }
    return slow + sorted(fat)


# ---- command line --------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a MoE GGUF of scripts/make_synthetic_gguf.py; default: one is made"
    )
    parser.add_argument("--widths", default="1,5,9", help="tokens per step, comma separated (default: 1,5,9)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of all contenders (default: 15)")
    parser.add_argument(
        "--steps", type=int, default=8, help="steps per contender, width and round (default: 8)"
    )
    parser.add_argument(
        "--threads", type=int, default=psutil.cpu_count(logical=False), help="default: all cores"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="wall (default), or cpu: the process's CPU time, for busy machines, with --threads 1 only",
    )
    parser.add_argument(
        "--no-repacked", action="store_true", help="leave out the repacked contender (less memory)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    parser.add_argument(
        "--check", action="store_true", help=f"exit with 1 below {MIN_RATIO} of stock's speed"
    )
    return parser.parse_args()


@contextlib.contextmanager
def model_path(named: Path | None) -> Iterator[Path]:
    """The named model, or a synthetic one of 1.4 GB that is deleted afterwards."""
    if named is not None:
        yield named
        return
    sys.path.insert(0, str(machine.REPOSITORY / "scripts"))
    import make_synthetic_gguf

    with tempfile.TemporaryDirectory(prefix="pyspac-bench-") as folder:
        path = Path(folder) / "small.gguf"
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the rows
            failed = make_synthetic_gguf.main([str(path)]) != 0
        if failed:
            sys.exit(2)
        yield path


def run(path: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """Load, attach, measure; everything is closed again at the end."""
    widths = [int(width) for width in args.widths.split(",")]
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load_model(path, repacked=False))
        stock = stack.enter_context(new_context(model, args.threads, widths))
        none = stack.enter_context(engine_contender("none", model, "15%", args.threads, widths))
        every = stack.enter_context(engine_contender("all", model, "100%", args.threads, widths))
        contenders = [Contender("stock", stock), none, every]
        if not args.no_repacked:
            repacked = stack.enter_context(load_model(path, repacked=True))
            ctx = stack.enter_context(new_context(repacked, args.threads, widths))
            contenders.append(Contender("repacked", ctx))
        times = interleave(
            contenders, widths, args.rounds, args.steps, model.vocab.n_tokens, CLOCKS[args.clock]
        )
    return summarise(contenders, times)


def main() -> int:
    args = parse_arguments()
    described = machine.describe()
    with model_path(args.model) as path:
        size_gb = path.stat().st_size / 1e9
        rows = run(path, args)
    setting = {
        "model": path.name,
        "model_gb": round(size_gb, 2),
        "n_threads_used": args.threads,
        "clock": args.clock,
    }
    if args.json:
        for row in rows:
            print(json.dumps(row | setting | {"machine": described}))
    else:
        print(machine.one_line(described))
        how = f"{args.threads} threads, {args.clock} time"
        print(f"{path.name}, {size_gb:.2f} GB, {how}; device: the CPU (emulated)")
        print_table(rows)
    broken = failures(rows)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
