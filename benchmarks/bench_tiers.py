#!/usr/bin/env python3
"""A model larger than memory: experts on disk and a pool in memory, against llama.cpp's mmap.

In: a model of some gigabytes (scripts/make_synthetic_gguf.py) on a local disk; root, for a memory cgroup.
Out: tokens per second of both within the same limit, which is a share of the file's size, the ratio of a
round's two, and how much of what the disk delivers was used.

    python scripts/make_synthetic_gguf.py big.gguf --like small --type Q8_0 --layers 24
    python benchmarks/bench_tiers.py --model big.gguf
    python benchmarks/bench_tiers.py --model big.gguf --shares 0.25 --rounds 5 --json -
    python benchmarks/bench_tiers.py --model big.gguf --shares 0.25 --predictor next-layer

Each measurement is a process of its own, in a cgroup of its own, with the file's pages dropped before, so
that nothing is left of the one before. `stock` is llama.cpp with mmap, `pyspac` is --device none --ram with
what the limit leaves, once more for each --predictor; the ways take turns. What the process needs besides
(Python, buffers) is added to the limit of both. The disk is measured in the same round: pieces as large as a
matrix of an expert, 32 at a time, around the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import machine
from rich.console import Console
from rich.progress import track

from pyspac.model.disk_probe import measure_disk
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import read_header
from pyspac.scheduler.config import NO_PREDICTOR
from pyspac.units import MIB

PROCESS_MIB: Final = 200  # Python, llama.cpp's buffers, a small context
STOCK: Final = "stock"
CGROUPS: Final = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
PROMPT: Final = "The quick brown fox jumps over the lazy dog. " * 4


# ------------------------------------------------------------------------------------------- the limit


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[Path]:
    """A cgroup (v1 or v2) with so much memory; yields its file of processes."""
    root = next(path for path in CGROUPS if path.is_dir())
    group = root / f"pyspac-bench-{os.getpid()}"
    group.mkdir()
    try:
        v1 = group / "memory.limit_in_bytes"
        (v1 if v1.exists() else group / "memory.max").write_text(str(n_bytes))
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):  # the kernel takes a moment to see that the last process is gone
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def drop_pages(model: Path) -> None:
    """Of the file, from the page cache."""
    fd = os.open(model, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# ----------------------------------------------------------------------------------------- measurements


def run_limited(argv: Sequence[str], model: Path, n_bytes: int, timeout_s: float) -> dict[str, Any]:
    """`pyspac run ... --json -` within a limit. RuntimeError with what it said if it fails."""
    drop_pages(model)
    with memory_limit(n_bytes) as procs:
        script = 'echo $$ > "$0" && exec "$@"'
        command = [
            "sh",
            "-c",
            script,
            str(procs),
            sys.executable,
            "-m",
            "pyspac",
            "run",
            *argv,
            "--json",
            "-",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr[-800:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(args: argparse.Namespace, geometry: MoeGeometry, share: float, round_: int) -> dict[str, Any]:
    """One round: both ways and the disk."""
    limit = int(share * geometry.model_bytes) + PROCESS_MIB * MIB
    others = geometry.model_bytes - geometry.experts_bytes
    ram_mib = min(limit - others - PROCESS_MIB * MIB, geometry.experts_bytes) // MIB
    common = ["-m", str(args.model), "-p", PROMPT, "-n", str(args.predict), "-c", "1024"]
    common += ["-t", str(args.threads), "--spec-type", "none"]
    ways = {STOCK: ["--stock", "--no-repack", "--device", "none"]}
    for name in (NO_PREDICTOR, *args.predictor):
        ways[name] = ["--device", "none", "--ram", str(ram_mib), "--predict", name]
    row: dict[str, Any] = {
        "memory_share": share,
        "round": round_,
        "limit_mib": limit // MIB,
        "ram_mib": ram_mib,
        "ways": {},
    }
    for way in list(ways)[:: 1 if round_ % 2 else -1]:
        found = run_limited([*common, *ways[way]], args.model, limit, args.timeout)
        prompt_s = found["ttft_ms"] / 1e3
        row["ways"][way] = {
            "decode": found["tps"],
            "prompt": found["n_prompt"] / prompt_s,
            "tier": found.get("tier"),
        }
    row["disk_gb_s"] = measure_disk(args.model, geometry.matrix_bytes, seconds=2.0).depth_32_gb_s
    return row


def sum_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per share, predictor and phase: medians, and the median of the rounds' ratios."""
    result = []
    for share in dict.fromkeys(row["memory_share"] for row in rows):
        mine = [row for row in rows if row["memory_share"] == share]
        for predict in (name for name in mine[0]["ways"] if name != STOCK):
            result += [_sum_up(mine, predict, phase) for phase in ("decode", "prompt")]
    return result


def _sum_up(mine: list[dict[str, Any]], predict: str, phase: str) -> dict[str, Any]:
    ratios = [row["ways"][predict][phase] / row["ways"][STOCK][phase] for row in mine]
    return {
        "memory_share": mine[0]["memory_share"],
        "predict": predict,
        "phase": phase,
        "stock_tps": median(row["ways"][STOCK][phase] for row in mine),
        "pyspac_tps": median(row["ways"][predict][phase] for row in mine),
        "ratio": median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "disk_gb_s": median(row["disk_gb_s"] for row in mine),
        "disk_share": median(_disk_share(row, predict) for row in mine),
    }


def _disk_share(row: dict[str, Any], predict: str) -> float:
    """What was read while anything was read, over what the disk gives; 0: nothing was read."""
    tier = row["ways"][predict]["tier"]
    if not tier or not tier["busy_us"]:
        return 0.0
    share: float = tier["read_bytes"] / tier["busy_us"] / 1e3 / row["disk_gb_s"]
    return share


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shares", default="0.25,0.5,1.1", help="of the file's size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--predict", type=int, default=32, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--predictor",
        action="append",
        default=[],
        metavar="NAME",
        help="of `pyspac run --predict`, besides none",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one process")
    parser.add_argument("--json", metavar="FILE", help="one line of JSON; - for stdout, and no table")
    args = parser.parse_args()
    if os.geteuid():
        print("bench_tiers.py: a memory cgroup needs root: run it with sudo", file=sys.stderr)
        return 2
    about = machine.describe()
    geometry = read_geometry(read_header(args.model))
    shares = [float(text) for text in args.shares.split(",")]
    todo = [(share, round_) for round_ in range(args.rounds) for share in shares]
    console = Console(file=sys.stderr)
    rows = [measure(args, geometry, *what) for what in track(todo, "rounds", console=console, transient=True)]
    summary = sum_up(rows)
    line = json.dumps(
        {"benchmark": "tiers", "machine": about, "model": args.model.name, "threads": args.threads,
         "model_bytes": geometry.model_bytes, "n_rounds": args.rounds, "rows": summary}
    )  # fmt: skip
    if args.json == "-":
        print(line)
        return 0
    print(machine.one_line(about))
    print(f"{args.model.name}, {geometry.model_bytes / 1e9:.2f} GB, {args.threads} threads\n")
    show(summary)
    if args.json:
        with Path(args.json).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


def show(summary: list[dict[str, Any]]) -> None:
    head = f"{'memory':>7} {'predictor':12} {'phase':8} {'mmap':>8} {'pyspac':>8} {'ratio':>22}"
    print(f"{head} {'of the disk':>12}")
    for r in summary:
        spread = f"{r['ratio']:.2f} ({r['ratio_lowest']:.2f} .. {r['ratio_highest']:.2f})"
        print(
            f"{r['memory_share']:7.0%} {r['predict']:12} {r['phase']:8} {r['stock_tps']:8.2f} "
            f"{r['pyspac_tps']:8.2f} {spread:>22} {r['disk_share']:11.0%}"
        )


if __name__ == "__main__":
    sys.exit(main())
