#!/usr/bin/env python3
"""Tokens per second beside other programs that compute, as a share of the speed without them.

A model decodes as `pyspac run --device none` does: single tokens, drafts of 5, prompts. Rounds without others
and rounds beside busy programs (loops that this program starts and ends) take turns. The fair share is the
machine's part that is left: with as many busy programs as cores, a half; what the system gave this program of
the cores' time is measured too, as Linux gives less where the others have sessions of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import machine
import psutil

from pyspac.engine.engine import Engine, host_buffer_type
from pyspac.engine.params import EngineParams
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import ALL_TENSORS, LOAD_MODE_NONE, Model, ModelParams

DEMO = machine.REPOSITORY / "pyspac" / "models" / "demo-moe.gguf"
FIRST_TOKEN = 300
N_CTX = 1024
N_CACHED = 32  # tokens in the cache before each timed step
LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # ends with this program, however that ends
    for _ in range(100_000): pass
"""
AUTOGROUP = "autogroup"  # Linux shares the cores among sessions, and this file has a session's priority


@contextlib.contextmanager
def busy_programs(n: int, *, in_sessions: bool) -> Iterator[None]:
    """So many loops, each a process of its own, or a session, which Linux may share the cores among."""
    loop = [sys.executable, "-c", LOOP]
    running = [subprocess.Popen(loop, start_new_session=in_sessions) for _ in range(n)]
    try:
        for process in running:
            give_own_priority(process.pid)
        time.sleep(0.3)  # until they loop
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def give_own_priority(pid: int) -> None:
    """Of this session to that of `pid`; where a session has none, all have the same."""
    with contextlib.suppress(OSError):
        if own := Path("/proc/self", AUTOGROUP).read_text().split():
            Path(f"/proc/{pid}", AUTOGROUP).write_text(own[-1])


@contextlib.contextmanager
def decoder(path: Path, n_threads: int, *, has_engine: bool) -> Iterator[Context]:
    buft = host_buffer_type() if has_engine else None
    params = ModelParams(
        path=path,
        buft=buft,
        buft_tensors=ALL_TENSORS,
        use_extra_bufts=not has_engine,
        load_mode=LOAD_MODE_NONE,
    )
    sizes = ContextParams(n_ctx=N_CTX, n_ubatch=512, n_outputs_max=16, n_threads=n_threads)
    with Model(params) as model, Context(model, sizes) as ctx, contextlib.ExitStack() as stack:
        if has_engine:
            assert ctx.ptr is not None
            engine = Engine.attach(ctx.ptr, EngineParams(device="none", cache="0"))
            stack.callback(engine.close)
        yield ctx


def tokens_per_s(ctx: Context, width: int, seconds: float) -> float:
    """Batches of `width` tokens, for so long."""
    n_tokens, spent = 0, 0.0
    while spent < seconds:
        ctx.clear()
        ctx.decode(range(FIRST_TOKEN, FIRST_TOKEN + N_CACHED), 1)
        n_steps = max(1, min(64, N_CTX // 2) // width)
        start = time.perf_counter()
        for step in range(n_steps):
            first = FIRST_TOKEN + step * width
            ctx.decode(range(first, first + width), min(width, 16))
        spent += time.perf_counter() - start
        n_tokens += n_steps * width
    return n_tokens / spent


def measure(ctx: Context, args: argparse.Namespace) -> list[dict[str, object]]:
    widths = [int(width) for width in args.widths.split(",")]
    quiet: dict[int, list[float]] = {width: [] for width in widths}
    beside: dict[int, list[float]] = {width: [] for width in widths}
    given: dict[int, list[float]] = {width: [] for width in widths}
    for width in widths:
        tokens_per_s(ctx, width, 0.1)  # allocates its graph
    for i in range(args.rounds):
        for width in widths:
            quiet[width].append(tokens_per_s(ctx, width, args.seconds))
        with busy_programs(args.busy, in_sessions=args.sessions):
            for width in widths:
                with cpu_share() as share:
                    beside[width].append(tokens_per_s(ctx, width, args.seconds))
                given[width].extend(share)
        print(f"\rround {i + 1}/{args.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [row_of(width, quiet[width], beside[width], given[width]) for width in widths]


@contextlib.contextmanager
def cpu_share() -> Iterator[list[float]]:
    """Filled at the end: the CPU time of this program over that of all cores, 0 to 1."""
    share: list[float] = []
    cpu, wall = time.process_time(), time.perf_counter()
    yield share
    share.append((time.process_time() - cpu) / (time.perf_counter() - wall) / (psutil.cpu_count() or 1))


def row_of(width: int, quiet: list[float], beside: list[float], given: list[float]) -> dict[str, object]:
    shares = sorted(b / statistics.median(quiet) for b in beside)
    return {
        "bench": "beside", "width": width, "n_rounds": len(quiet),
        "quiet_tps": round(statistics.median(quiet), 1), "beside_tps": round(statistics.median(beside), 1),
        "share": round(statistics.median(shares), 3), "share_least": round(shares[0], 3),
        "share_most": round(shares[-1], 3), "cpu_share": round(statistics.median(given), 3),
    }  # fmt: skip


def print_table(rows: list[dict[str, object]]) -> None:
    print(f"{'tokens':>6} {'quiet t/s':>10} {'beside t/s':>10} {'share':>6} {'least..most':>12} {'CPU':>6}")
    for row in rows:
        spread = f"{row['share_least']}..{row['share_most']}"
        speeds = f"{row['quiet_tps']:>10} {row['beside_tps']:>10}"
        print(f"{row['width']:>6} {speeds} {row['share']:>6} {spread:>12} {row['cpu_share']:>6}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    n_cores = psutil.cpu_count() or 1
    parser.add_argument("--model", type=Path, default=DEMO, help="a MoE GGUF (default: the demo's)")
    parser.add_argument(
        "--busy", type=int, default=n_cores, help="programs that compute (default: as many as cores)"
    )
    parser.add_argument("--threads", type=int, default=n_cores, help="default: all cores")
    parser.add_argument("--widths", default="1,5,256", help="tokens per batch (default: 1,5,256)")
    parser.add_argument("--rounds", type=int, default=10, help="default: 10")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each width and round (default: 1)")
    parser.add_argument("--sessions", action="store_true", help="each busy program in a session of its own")
    parser.add_argument("--stock", action="store_true", help="llama.cpp as it is, without an engine")
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    described = machine.describe()
    with decoder(args.model, args.threads, has_engine=not args.stock) as ctx:
        rows = measure(ctx, args)
    setting = {
        "model": args.model.name, "n_busy": args.busy, "n_threads_used": args.threads,
        "stock": args.stock, "in_sessions": args.sessions,
    }  # fmt: skip
    if args.json:
        for row in rows:
            print(json.dumps(row | setting | {"machine": described}))
    else:
        print(machine.one_line(described))
        print(f"{args.model.name}, {args.threads} threads, beside {args.busy} busy programs")
        print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
