#!/usr/bin/env python3
"""A model larger than memory: experts on disk and a pool in memory, against llama.cpp's mmap.

In: a model of some gigabytes (scripts/make_synthetic_gguf.py) on a local disk; root, for a memory cgroup.
Out: tokens per second of both within the same limit, which is a share of the file's size, the ratio of a
round's two, and how much of what the disk delivers was used.

    python scripts/make_synthetic_gguf.py big.gguf --like small --type Q8_0 --layers 28
    python benchmarks/bench_tiers.py --model big.gguf --check
    python benchmarks/bench_tiers.py --model big.gguf --shares 0.25 --rounds 5 --json -
    python benchmarks/bench_tiers.py --model big.gguf --shares 0.25 --predictor next-layer

Each measurement is a process of its own, in a cgroup of its own, with the file's pages dropped before, so
that nothing is left of the one before. `stock` is llama.cpp with mmap, `pyspac` is --device none --ram with
what the limit leaves beside all that `pyspac inspect` counts, once more for each --predictor; the ways take
turns. What Python and its libraries take is added to the limit of both. With mmap few tokens are decoded
(--stock-predict), as each takes seconds.

With a share of 1 and more all fits: the file's pages are in memory before either begins, and neither reads
anything later.

The disk is measured in the same round, around the page cache, 32 pieces at a time, each as large as a matrix
of an expert: in the file's order, as a prompt reads, and at random places, as decoding does. `of the disk` is
what was read in a phase, by the clock's time for the whole phase, over that.
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

from pyspac.engine.devices import cpu_device
from pyspac.engine.memory import free_memory
from pyspac.errors import PyspacError
from pyspac.forward.preflight import choose_n_ctx
from pyspac.model.checks import check_model_file
from pyspac.model.device_needs import estimate_needs
from pyspac.model.disk_probe import measure_disk, measure_in_order
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.memory_tier import host_bytes, least_bytes
from pyspac.model.prompt_piece import fit_piece, wanted_piece
from pyspac.scheduler.config import NO_PREDICTOR
from pyspac.units import MIB

PROCESS_MIB: Final = 200  # Python and its libraries
N_CTX: Final = 1024
STOCK: Final = "stock"
CGROUPS: Final = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
PROMPT: Final = "The quick brown fox jumps over the lazy dog. " * 4
SAVED: Final = machine.REPOSITORY / "benchmarks/results/tiers.jsonl"
# what --check asks for: (share of memory, phase) -> least ratio; of the disk wherever it is read
WANTED: Final = {(0.25, "decode"): 5.0, (0.5, "decode"): 2.0, (0.25, "prompt"): 2.0, (0.5, "prompt"): 2.0}
WANTED_WHERE_ALL_FITS: Final = 0.98
WANTED_OF_DISK: Final = 0.85


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


def take_pages(model: Path) -> None:
    """The whole file into the page cache."""
    with model.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


# ----------------------------------------------------------------------------------------- measurements


def run_limited(argv: Sequence[str], n_bytes: int, timeout_s: float) -> dict[str, Any]:
    """`pyspac run ... --json -` within a limit. PyspacError with what it said if it fails."""
    with memory_limit(n_bytes) as procs:
        script = 'echo $$ > "$0" && exec "$@"'
        run = [sys.executable, "-m", "pyspac", "run", *argv, "--json", "-"]
        done = subprocess.run(
            ["sh", "-c", script, str(procs), *run],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    if done.returncode:
        said = " ".join(done.stderr.split())[-800:]
        raise PyspacError(f"with {n_bytes // MIB} MiB `pyspac run` ends with {done.returncode}: {said}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def ways_of(args: argparse.Namespace, ram: str) -> dict[str, list[str]]:
    ways = {STOCK: ["--stock", "--no-repack", "--device", "none"]}
    for name in (NO_PREDICTOR, *args.predictor):
        ways[name] = ["--device", "none", "--ram", ram, "--predict", name]
    return ways


def pool_bytes(header: GgufHeader, share: float) -> int:
    """What `--ram` may be where the limit is that share of the file: all but what else the model needs, as
    `pyspac inspect` has it. PyspacError if one layer's experts do not fit."""
    geometry = read_geometry(header)
    n_ctx = choose_n_ctx(N_CTX, geometry)
    n_ubatch = fit_piece(wanted_piece(geometry, "disk"), header, n_ctx, free_memory())
    needs = estimate_needs(header, None, n_ctx, n_ubatch)
    others = host_bytes(geometry, cpu_device(has_cache=False), None, needs)
    pool = int(share * geometry.model_bytes) - others
    if pool < least_bytes(geometry):
        least = (least_bytes(geometry) + others) / geometry.model_bytes
        raise PyspacError(
            f"a share of {share:g} has no room for the experts of one layer: give {least + 5e-4:.3f} or more"
        )
    return pool


def measure(args: argparse.Namespace, header: GgufHeader, share: float, round_: int) -> dict[str, Any]:
    """One round: both ways and the disk."""
    geometry = read_geometry(header)
    limit = int(share * geometry.model_bytes) + PROCESS_MIB * MIB
    all_fits = share >= 1.0
    ways = ways_of(args, "100%" if all_fits else str(pool_bytes(header, share) // MIB))
    row: dict[str, Any] = {"memory_share": share, "round": round_, "limit_mib": limit // MIB, "ways": {}}
    for way in list(ways)[:: 1 if round_ % 2 else -1]:
        (take_pages if all_fits else drop_pages)(args.model)
        is_slow = way == STOCK and not all_fits
        n_predict = min(args.predict, args.stock_predict) if is_slow else args.predict
        argv = ["-m", str(args.model), "-p", PROMPT, "-n", str(n_predict), "-c", str(N_CTX)]
        argv += ["-t", str(args.threads), "--spec-type", "none", *ways[way]]
        row["ways"][way] = phases_of(run_limited(argv, limit, args.timeout))
    row["disk_gb_s"] = {
        "prompt": measure_in_order(args.model, geometry.matrix_bytes, seconds=1.0),
        "decode": measure_disk(args.model, geometry.matrix_bytes, seconds=1.0).depth_32_gb_s,
    }
    return row


def phases_of(found: dict[str, Any]) -> dict[str, Any]:
    """Of one run: tokens per second, and 1e9 bytes read per second, each by the clock."""
    prompt_s, n_decoded = found["ttft_ms"] / 1e3, len(found["token_ids"]) - 1
    n_prompt, n_all = found["prompt_read_bytes"] or 0, (found["tier"] or {}).get("read_bytes", 0)
    return {
        "prompt": {"tps": found["n_prompt"] / prompt_s, "gb_s": n_prompt / prompt_s / 1e9},
        "decode": {"tps": found["tps"], "gb_s": (n_all - n_prompt) * found["tps"] / n_decoded / 1e9},
    }


def sum_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per share, predictor and phase: medians, and the median of the rounds' ratios."""
    result = []
    for share in dict.fromkeys(row["memory_share"] for row in rows):
        mine = [row for row in rows if row["memory_share"] == share]
        for predict in (name for name in mine[0]["ways"] if name != STOCK):
            result += [_sum_up(mine, predict, phase) for phase in ("decode", "prompt")]
    return result


def _sum_up(mine: list[dict[str, Any]], predict: str, phase: str) -> dict[str, Any]:
    found = [(row["ways"][predict][phase], row["ways"][STOCK][phase]) for row in mine]
    ratios = [ours["tps"] / stock["tps"] for ours, stock in found]
    return {
        "memory_share": mine[0]["memory_share"],
        "predict": predict,
        "phase": phase,
        "stock_tps": median(stock["tps"] for _, stock in found),
        "pyspac_tps": median(ours["tps"] for ours, _ in found),
        "ratio": median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "read_gb_s": median(ours["gb_s"] for ours, _ in found),
        "disk_gb_s": median(row["disk_gb_s"][phase] for row in mine),
        "disk_share": median(row["ways"][predict][phase]["gb_s"] / row["disk_gb_s"][phase] for row in mine),
    }


def missed(summary: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence per figure that is less than what is wanted; predictors are not asked."""
    result = []
    for row in (row for row in summary if row["predict"] == NO_PREDICTOR):
        share, phase = row["memory_share"], row["phase"]
        wanted = WANTED_WHERE_ALL_FITS if share >= 1.0 else WANTED.get((share, phase), 0.0)
        where = f"memory for {share:.0%}, {phase}"
        if row["ratio"] < wanted:
            result.append(f"{where}: {row['ratio']:.2f} times mmap, wanted {wanted:g}")
        if share < 1.0 and row["disk_share"] < WANTED_OF_DISK:
            result.append(f"{where}: {row['disk_share']:.0%} of the disk, wanted {WANTED_OF_DISK:.0%}")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shares", default="0.25,0.5,1.3", help="of the file's size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--predict", type=int, default=32, help="tokens (default: %(default)s)")
    parser.add_argument("--stock-predict", type=int, default=8, help="with mmap (default: %(default)s)")
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
    parser.add_argument("--save", action="store_true", help=f"the same line, into {SAVED.name}")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a figure is less than wanted")
    args = parser.parse_args()
    if os.geteuid():
        print("bench_tiers.py: a memory cgroup needs root: run it with sudo", file=sys.stderr)
        return 2
    about = machine.describe()
    try:
        header = check_model_file(args.model)
        geometry = read_geometry(header)
        rows = list(measure_all(args, header))
    except (PyspacError, subprocess.TimeoutExpired) as error:
        print(f"bench_tiers.py: {error}", file=sys.stderr)
        return 2
    summary = sum_up(rows)
    line = json.dumps(
        {"benchmark": "tiers", "machine": about, "model": args.model.name, "threads": args.threads,
         "model_bytes": geometry.model_bytes, "n_rounds": args.rounds, "rows": summary}
    )  # fmt: skip
    if args.json == "-":
        print(line)
    else:
        print(machine.one_line(about))
        print(f"{args.model.name}, {geometry.model_bytes / 1e9:.2f} GB, {args.threads} threads\n")
        show(summary)
    for path in ([Path(args.json)] if args.json not in (None, "-") else []) + ([SAVED] if args.save else []):
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    less = missed(summary) if args.check else []
    for sentence in less:
        print(sentence, file=sys.stderr)
    return 1 if less else 0


def measure_all(args: argparse.Namespace, header: GgufHeader) -> Iterator[dict[str, Any]]:
    shares = [float(text) for text in args.shares.split(",")]
    todo = [(share, round_) for round_ in range(args.rounds) for share in shares]
    for what in track(todo, "rounds", console=Console(file=sys.stderr), transient=True):
        yield measure(args, header, *what)


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
