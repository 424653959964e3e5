#!/usr/bin/env python3
"""`pyspac fit` against runs, and tables of other machines.

    python benchmarks/bench_fit.py --check                # models of known geometries, some layers of each
    python benchmarks/bench_fit.py --tables               # 8 to 64 GB of memory, cards of 4 to 24 GB

--check writes synthetic models, predicts each as `pyspac fit FILE` does and runs it, in memory and with a
quarter of its experts there; both in turns, medians of the rounds. A few layers stand for all of them: what
is predicted is that file. `found`: with the share of experts found in memory that the run had, which random
weights decide, instead of that of recorded texts. Exit code 1 if a median is off by more than WANTED.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import machine as named
from rich.console import Console
from rich.table import Table

from pyspac.commands.fit import DEFAULT_N_CTX, cells, measure
from pyspac.engine.cpus import default_n_threads
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import read_geometry
from pyspac.model.known_models import Weights, all_weights
from pyspac.model.memory_tier import MARGIN_BYTES
from pyspac.model.speed_forecast import BUFFERS_BYTES, Machine, forecast
from pyspac.units import GIB

WANTED: Final = 0.20
MODELS: Final = {"qwen3-30b-a3b": 6, "gpt-oss-20b": 6, "mixtral-8x7b": 2, "olmoe-1b-7b": 8}  # layers
SHARE: Final = 0.25  # of the experts, in memory
N_PREDICT: Final = 48
PROMPT: Final = "The quick brown fox jumps over the lazy dog. " * 50
SAVED: Final = named.REPOSITORY / "benchmarks/results/fit.jsonl"
RAM_GIB: Final = (8, 16, 32, 64)
CARDS_GIB: Final = (4, 8, 12, 16, 24)


# ------------------------------------------------------------------------------------------- the check


def run(model: Path, ram: str | None, n_predict: int) -> dict[str, Any]:
    """One run without a device; a prompt of some hundred tokens."""
    argv = [sys.executable, "-m", "pyspac", "run", "-m", str(model), "--device", "none", "-p", PROMPT]
    argv += ["-n", str(n_predict), "-c", str(DEFAULT_N_CTX), "--temp", "0", "--json", "-"]
    argv += ["--ignore-eos"] + ([] if ram is None else ["--ram", ram])
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model.name}: {done.stderr[-800:]}")
    return dict(json.loads(done.stdout))


def check_model(model: Path, rounds: int) -> Iterator[dict[str, Any]]:
    header = check_model_file(model)
    geometry = read_geometry(header)
    weights = Weights.of_file(header, geometry, {DEFAULT_N_CTX: 0})
    pool = int(SHARE * geometry.experts_bytes)
    head = BUFFERS_BYTES + MARGIN_BYTES + weights.others_bytes
    for place, ram_bytes, ram in (("memory", 1 << 50, None), ("disk", head + pool, f"{pool}B")):
        turns = [one_turn(model, weights, ram_bytes, ram) for _ in range(rounds)]
        row: dict[str, Any] = {"place": place}
        for name in turns[0]:
            row[name] = median(turn[name] for turn in turns)
        for kind in ("decode", "prompt", "found"):
            errors = [turn[f"{kind}_predicted"] / turn[f"{kind}_tps"] - 1 for turn in turns]
            row[f"{kind}_error"] = median(errors)
        yield row


def one_turn(model: Path, weights: Weights, ram_bytes: int, ram: str | None) -> dict[str, float]:
    here = measure(default_n_threads(), ram_bytes, 0, model)
    predicted = forecast(weights, here, DEFAULT_N_CTX)
    found = run(model, ram, N_PREDICT)
    tier = found["tier"]
    share = tier["n_hit"] / max(1, tier["n_hit"] + tier["n_miss"]) if tier else None
    known = forecast(weights, here, DEFAULT_N_CTX, share)
    assert predicted.decode_tps is not None
    assert predicted.prompt_tps is not None
    assert known.decode_tps is not None
    return {
        "decode_predicted": predicted.decode_tps, "decode_tps": found["tps"],
        "found_predicted": known.decode_tps, "found_tps": found["tps"],
        "prompt_predicted": predicted.prompt_tps,
        "prompt_tps": found["n_prompt"] / found["ttft_ms"] * 1e3,
        "share_found": 1.0 if share is None else share,
    }  # fmt: skip


def check(models: Sequence[str], rounds: int, folder: Path, console: Console) -> list[dict[str, Any]]:
    rows = []
    for like in models:
        path = folder / f"{like}.gguf"
        write = [sys.executable, "scripts/make_synthetic_gguf.py", str(path), "--like", like, "--force"]
        subprocess.run([*write, "--layers", str(MODELS[like])], check=True, cwd=named.REPOSITORY)
        rows += [{"model": like, "layers": MODELS[like], **row} for row in check_model(path, rounds)]
        path.unlink()
    table = Table("model", "layers", "experts in", "decoding: predicted, measured", "error", "with found",
                  "prompts: predicted, measured", "error", box=None)  # fmt: skip
    for row in rows:
        table.add_row(
            row["model"], str(row["layers"]), row["place"],
            f"{row['decode_predicted']:.1f}, {row['decode_tps']:.1f}", f"{row['decode_error']:+.0%}",
            f"{row['found_error']:+.0%}", f"{row['prompt_predicted']:.0f}, {row['prompt_tps']:.0f}",
            f"{row['prompt_error']:+.0%}",
        )  # fmt: skip
    console.print(table)
    return rows


# ----------------------------------------------------------------------------------------- the tables


def tables(here: Machine) -> str:
    """Only memory, then cards beside 32 GiB."""
    lines = [f"| model | {' | '.join(f'{n} GB' for n in RAM_GIB)} |", f"|---|{'---|' * len(RAM_GIB)}"]
    lines += [
        line(w, [replace(here, ram_bytes=n * GIB) for n in RAM_GIB]) for w in all_weights(DEFAULT_N_CTX)
    ]
    lines += ["", f"| model, 32 GB and a card | {' | '.join(f'{n} GB' for n in CARDS_GIB)} |"]
    lines += [f"|---|{'---|' * len(CARDS_GIB)}"]
    cards = [replace(here, ram_bytes=32 * GIB, vram_bytes=n * GIB) for n in CARDS_GIB]
    lines += [line(w, cards) for w in all_weights(DEFAULT_N_CTX)]
    return "\n".join(lines)


def line(weights: Weights, machines: Sequence[Machine]) -> str:
    found = [cells(forecast(weights, one, DEFAULT_N_CTX)) for one in machines]
    name, size = found[0][0], found[0][1]
    speeds = (f"{row[4]}, {row[5]}{' (disk)' if 'disk' in row[3] else ''}" for row in found)
    return f"| {name}, {size} GB | {' | '.join(text if text[0] != '-' else '-' for text in speeds)} |"


def print_tables(here: Machine) -> None:
    about = named.describe()
    print(
        f"{about['cpu']}, {default_n_threads()} threads, memory {here.memory_gb_s:.0f} GB/s, disk "
        f"{here.disk.depth_32_gb_s:.1f} GB/s, commit {about['pyspac_commit']}: tokens/s of "
        "decoding, of prompts.\n"
    )
    print(tables(here))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="predictions against runs")
    parser.add_argument("--tables", action="store_true", help="other sizes of memory and cards, as Markdown")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the models, up to 6 GB")
    args = parser.parse_args()
    console = Console()
    if args.tables:
        print_tables(measure(default_n_threads(), GIB))
    if not args.check:
        return 0
    about = named.describe()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = check(args.models.split(","), args.rounds, Path(folder), console)
    with SAVED.open("a", encoding="utf-8") as file:
        file.write(
            json.dumps({"benchmark": "fit", "machine": about, "n_rounds": args.rounds, "rows": rows}) + "\n"
        )
    wrong = [row for row in rows if max(abs(row["decode_error"]), abs(row["prompt_error"])) > WANTED]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
