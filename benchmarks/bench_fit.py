#!/usr/bin/env python3
"""`pyspac fit` against runs, and tables of other machines.

    python benchmarks/bench_fit.py --check                # models of known geometries, some layers of each
    python benchmarks/bench_fit.py --check --models qwen3-30b-a3b:48 --places disk --ram 6G
    python benchmarks/bench_fit.py --measure              # what --tables computes with
    python benchmarks/bench_fit.py --tables               # into docs/fit.md: other sizes of memory, and cards

--check writes synthetic models, predicts each as `pyspac fit FILE` does and runs it, in memory and with a
quarter of its experts (--ram: so much of them; one layer's at least) there. Each round measures the machine,
then runs both; the median prediction is compared with the median run, and rows have every turn. A few layers
stand for all of them: what is predicted is that file. `found`: with the share of experts found in memory
that decoding had, which random weights decide, not with that of recorded texts. `had a core`: of the time in
which the model's threads wanted a core, at the run's end; on a quiet machine nearly all. Exit code 1 if a
prompt's median, or one of decoding with the share that was found, is off by more than WANTED.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import machine as named
from rich.console import Console
from rich.table import Table

from pyspac.commands.fit import cells
from pyspac.commands.machine_speed import measure
from pyspac.engine.cpus import default_n_threads
from pyspac.engine.values import read_size
from pyspac.errors import UsageError
from pyspac.forward.options import DEFAULT_N_CTX
from pyspac.model.checks import check_model_file
from pyspac.model.device_needs import kv_bytes
from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.geometry import read_geometry
from pyspac.model.known_models import Weights, all_weights
from pyspac.model.memory_tier import MARGIN_BYTES, least_bytes
from pyspac.model.speed_forecast import BUFFERS_BYTES, KernelSpeed, Machine, forecast
from pyspac.units import GIB

WANTED: Final = 0.20
MODELS: Final = {"qwen3-30b-a3b": 6, "gpt-oss-20b": 6, "mixtral-8x7b": 2, "olmoe-1b-7b": 8}  # layers
SHARE: Final = 0.25  # of the experts, in memory
N_PREDICT: Final = 48
PROMPT: Final = (
    "The quick brown fox jumps over the lazy dog. " * 20
)  # some hundred tokens of these vocabularies
DOCS: Final = named.REPOSITORY / "docs/fit.md"
BEGIN, END = "<!-- tables: written by benchmarks/bench_fit.py --tables -->", "<!-- end -->"
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


def check_model(model: Path, rounds: int, places: Sequence[str], ram: str | None) -> Iterator[dict[str, Any]]:
    header = check_model_file(model)
    geometry = read_geometry(header)
    weights = Weights.of_file(header, geometry, {DEFAULT_N_CTX: kv_bytes(header, DEFAULT_N_CTX)})
    given = read_size("--ram", ram, 0) if ram else None
    pool = given or max(int(SHARE * geometry.experts_bytes), least_bytes(geometry))
    head = BUFFERS_BYTES + MARGIN_BYTES + weights.others_bytes + weights.kv[DEFAULT_N_CTX]
    sizes = {"memory": (1 << 50, None), "disk": (head + pool, f"{pool}B")}
    turns: dict[str, list[dict[str, float]]] = {place: [] for place in places}
    for _ in range(rounds):
        here = measure(default_n_threads(), 0, 0, model, sorted(weights.types))
        for place in places:
            ram_bytes, given_ram = sizes[place]
            turns[place].append(one_turn(model, weights, replace(here, ram_bytes=ram_bytes), given_ram))
    for place, found in turns.items():
        row: dict[str, Any] = {"place": place, "pool_bytes": None if place == "memory" else pool}
        row |= {name: median(turn[name] for turn in found) for name in found[0]}
        for kind in ("decode", "prompt", "found"):
            row[f"{kind}_error"] = row[f"{kind}_predicted"] / row[f"{kind}_tps"] - 1
        yield row | {"turns": found}


def share_found(run: dict[str, Any], weights: Weights) -> float | None:
    """Of the experts in use after the prompt those in memory, by the bytes that were read; None: no disk.

    Prompts find another share: they use nearly all experts, which are read ahead.
    """
    if not run["tier"]:
        return None
    n_used = (run["n_tokens"] - 1) * weights.n_layer_moe * weights.n_expert_used
    n_read = run["tier"]["read_bytes"] - run["prompt_read_bytes"]
    return float(max(0.0, 1.0 - n_read / (n_used * weights.expert_bytes)))


def one_turn(model: Path, weights: Weights, here: Machine, ram: str | None) -> dict[str, float]:
    """A run after `here` was measured, beside what that foretells."""
    found = run(model, ram, N_PREDICT)
    n_prompt = found["n_prompt"]
    n_text = n_prompt + N_PREDICT // 2
    predicted = forecast(weights, here, DEFAULT_N_CTX, n_text=n_text)
    of_prompt = forecast(weights, here, DEFAULT_N_CTX, n_text=n_prompt)
    share = share_found(found, weights)
    known = forecast(weights, here, DEFAULT_N_CTX, share, n_text)
    assert predicted.decode_tps is not None
    assert of_prompt.prompt_tps is not None
    assert known.decode_tps is not None
    return {
        "decode_predicted": predicted.decode_tps, "decode_tps": found["tps"],
        "found_predicted": known.decode_tps, "found_tps": found["tps"],
        "prompt_predicted": of_prompt.prompt_tps, "prompt_tps": n_prompt / found["ttft_ms"] * 1e3,
        "share_found": 1.0 if share is None else share, "had_core": found["threads"]["share"],
    }  # fmt: skip


def check(args: argparse.Namespace, folder: Path, console: Console) -> list[dict[str, Any]]:
    """A file that is there already is taken as it is, and stays."""
    rows = []
    for word in args.models.split(","):
        like, _, given = word.partition(":")
        layers = int(given) if given else MODELS[like]
        path = folder / f"{like}-{layers}.gguf"
        is_there = path.exists()
        if not is_there:
            write = [sys.executable, "scripts/make_synthetic_gguf.py", str(path), "--like", like]
            subprocess.run([*write, "--layers", str(layers)], check=True, cwd=named.REPOSITORY)
        found = check_model(path, args.rounds, args.places.split(","), args.ram)
        of_model = [{"model": like, "layers": layers, **row} for row in found]
        show(of_model, console)
        rows += of_model
        if not is_there:
            path.unlink()
    return rows


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("model", "layers", "experts in", "decoding: predicted, measured", "error", "with found",
                  "prompts: predicted, measured", "error", "had a core", box=None)  # fmt: skip
    for row in rows:
        table.add_row(
            row["model"], str(row["layers"]), row["place"],
            f"{row['decode_predicted']:.1f}, {row['decode_tps']:.1f}", f"{row['decode_error']:+.0%}",
            f"{row['found_error']:+.0%}", f"{row['prompt_predicted']:.0f}, {row['prompt_tps']:.0f}",
            f"{row['prompt_error']:+.0%}", f"{row['had_core']:.0%}",
        )  # fmt: skip
    console.print(table)


# ----------------------------------------------------------------------------------------- the tables


def tables(here: Machine) -> str:
    """Only memory, then cards beside 32 GiB; of each model the first, smallest quantisation."""
    models: dict[str, Weights] = {}
    for weights in all_weights(DEFAULT_N_CTX):
        models.setdefault(weights.name, weights)
    lines = [f"| model | {' | '.join(f'{n} GB' for n in RAM_GIB)} |", f"|---|{'---|' * len(RAM_GIB)}"]
    lines += [line(w, [replace(here, ram_bytes=n * GIB) for n in RAM_GIB]) for w in models.values()]
    lines += ["", f"| model, 32 GB and a card | {' | '.join(f'{n} GB' for n in CARDS_GIB)} |"]
    lines += [f"|---|{'---|' * len(CARDS_GIB)}"]
    cards = [replace(here, ram_bytes=32 * GIB, vram_bytes=n * GIB) for n in CARDS_GIB]
    lines += [line(w, cards) for w in models.values()]
    return "\n".join(lines)


def line(weights: Weights, machines: Sequence[Machine]) -> str:
    found = [cells(forecast(weights, one, DEFAULT_N_CTX)) for one in machines]
    name, size = found[0][0], found[0][1]
    speeds = (f"{row[4]}, {row[5]}{'*' if 'disk' in row[3] else ''}" for row in found)
    return f"| {name}, {size} GB | {' | '.join(text if text[0] != '-' else '-' for text in speeds)} |"


def text_of(row: dict[str, Any]) -> str:
    """Of the docs, from what --measure has saved."""
    about, found = row["machine"], row["measured"]
    kernels = {name: KernelSpeed(tuple(speed)) for name, speed in found["kernels"].items()}
    here = Machine(
        ram_bytes=GIB, memory_gb_s=found["memory_gb_s"], kernels=kernels, disk=DiskSpeed(**found["disk"]),
        n_threads=about["n_threads"],
    )  # fmt: skip
    if "attention_gop_s" in found:  # older rows have the speeds that are the default
        here = replace(here, attention_gop_s=tuple(found["attention_gop_s"]))
    here = replace(here, per_expert=found.get("per_expert", 0))
    return (
        f"Tokens/s of decoding, of prompts; predicted for {about['cpu']}, {about['n_threads']} threads, "
        f"memory {here.memory_gb_s:.0f} GB/s, disk {here.disk.depth_32_gb_s:.1f} GB/s, commit "
        f"{about['pyspac_commit']}. *: experts on disk. With a card: predicted, never measured.\n\n"
        f"{tables(here)}"
    )


def with_tables(text: str) -> str:
    """The docs with tables of the last machine that was measured."""
    rows = [json.loads(line) for line in SAVED.read_text(encoding="utf-8").splitlines()]
    last = [row for row in rows if row["benchmark"] == "fit, machine"][-1]
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{text_of(last)}\n{END}{rest.partition(END)[2]}"


def save(row: dict[str, Any]) -> None:
    with SAVED.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def measured() -> dict[str, Any]:
    here = measure(default_n_threads(), GIB)
    kernels = {name: speed.gb_s for name, speed in here.kernels.items()}
    disk = asdict(here.disk) | {"path": "a probe"}
    return {
        "memory_gb_s": here.memory_gb_s,
        "kernels": kernels,
        "attention_gop_s": here.attention_gop_s,
        "per_expert": here.per_expert,
        "disk": disk,
    }


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Before anything is measured; ends with 2."""
    if args.rounds < 1:
        parser.error(f"--rounds cannot be {args.rounds}: give 1 or more")
    for word in args.models.split(","):
        name, colon, layers = word.partition(":")
        if name not in MODELS or (colon and not (layers.isdecimal() and int(layers) > 0)):
            parser.error(f"--models has {word!r}: give some of {', '.join(MODELS)}, as NAME or NAME:LAYERS")
    if unknown := set(args.places.split(",")) - {"memory", "disk"}:
        parser.error(f"--places has {', '.join(map(repr, unknown))}: give memory, disk or both")
    try:
        if args.ram and not read_size("--ram", args.ram, 0):
            parser.error(f"--ram {args.ram} holds nothing: give GiB (8G) or MiB (8000)")
    except UsageError as error:
        parser.error(str(error))
    if args.folder and not args.folder.is_dir():
        parser.error(f"--folder {args.folder} is no folder: make it first")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="predictions against runs")
    parser.add_argument("--measure", action="store_true", help="save this machine's speeds")
    parser.add_argument("--tables", action="store_true", help="write docs/fit.md's tables of what is saved")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}; NAME:LAYERS")
    parser.add_argument("--places", default="memory,disk")
    parser.add_argument("--ram", help="for the experts, where they are on disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the models, up to 6 GB")
    args = parser.parse_args()
    check_arguments(parser, args)
    about = named.describe()
    if args.measure:
        save({"benchmark": "fit, machine", "machine": about, "measured": measured()})
    if args.tables:
        DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
    if not args.check:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = check(args, args.folder or Path(folder), Console())
    save({"benchmark": "fit", "machine": about, "n_rounds": args.rounds, "rows": rows})
    wrong = [row for row in rows if max(abs(row["found_error"]), abs(row["prompt_error"])) > WANTED]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
