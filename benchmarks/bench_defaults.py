#!/usr/bin/env python3
"""`pyspac run -m MODEL -p TEXT` with no other flag, beside llama.cpp: weights as in the file, and repacked.

Each has a llama-server, as `pyspac run` starts it, and they take turns, round by round, on the same prompt:
whole generations, one token per step, decoding timed by the server. A ratio is the median over rounds of
(pyspac's speed / the other's in the same round); `ratio` is the smaller one, that to the faster llama.cpp.
Models: the demo's, and synthetic ones of 1.3 GB (scripts/make_synthetic_gguf.py), written to a temporary
folder unless --folder names one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine

from pyspac.commands.run_flags import parse_run
from pyspac.commands.server_options import own_options
from pyspac.talk.turns import Speeds, Spread, compare, stock_and_own

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "pyspac/models/demo-moe.gguf"
MIN_RATIO = 0.98
OTHERS = ("stock", "repacked")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the text it goes on from, and what makes it unless it is a file already."""

    prompt: str
    synthetic: tuple[str, ...] = ()


CASES = {
    "demo": Case("import os\n\n\ndef read_lines(path):\n"),
    "q8_0": Case("the", ("--type", "Q8_0", "--experts", "64")),
    "q4_k": Case("the", ("--type", "Q4_K", "--experts", "128")),
}


@contextlib.contextmanager
def model_of(name: str, folder: Path | None) -> Iterator[Path]:
    """The file of a case, of --folder if it is there, else written for as long as it is needed."""
    case = CASES[name]
    if not case.synthetic:
        yield DEMO
        return
    if folder is not None and (folder / f"{name}.gguf").is_file():
        yield folder / f"{name}.gguf"
        return
    sys.path.insert(0, str(ROOT / "scripts"))
    make_synthetic_gguf = importlib.import_module("make_synthetic_gguf")
    with tempfile.TemporaryDirectory() if folder is None else contextlib.nullcontext(folder) as target:
        path = Path(target) / f"{name}.gguf"
        with contextlib.redirect_stdout(sys.stderr):
            if make_synthetic_gguf.main([str(path), *case.synthetic]) != 0:
                raise RuntimeError(f"{path} could not be written: see above")
        yield path


def measure(path: Path, prompt: str, args: argparse.Namespace) -> Speeds:
    threads = [] if args.threads is None else ["--threads", str(args.threads)]
    options = own_options(*parse_run(["-m", str(path), *threads]))
    return compare(stock_and_own(options), prompt, args.rounds, args.tokens)


def row_of(name: str, speeds: Speeds, args: argparse.Namespace) -> dict[str, Any]:
    """One object of --json."""
    best = speeds.ratio_to_best("pyspac")
    return {
        "model": name,
        "ratio": round(best.median, 4),
        "ratio_quartiles": [round(best.low, 4), round(best.high, 4)],
        **{f"ratio_to_{other}": round(speeds.ratio("pyspac", other).median, 4) for other in OTHERS},
        **{f"{way}_tps": round(speeds.of(way).median, 2) for way in speeds.tps},
        "n_rounds": args.rounds,
        "n_predict": args.tokens,
        "n_threads_used": args.threads,
    }


def text_of(spread: Spread) -> str:
    return f"{spread.median:6.3f} ({spread.low:.3f} to {spread.high:.3f})"


def say(name: str, speeds: Speeds) -> None:
    """One line on stderr."""
    tps = ", ".join(f"{way} {speeds.of(way).median:.1f}" for way in speeds.tps)
    ratios = "; ".join(f"to {other} {text_of(speeds.ratio('pyspac', other))}" for other in OTHERS)
    print(f"{name}: {tps} tokens/s; pyspac {ratios}", file=sys.stderr)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES), help="of demo, q8_0, q4_k (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way (default: 15)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each turn (default: 96)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as pyspac run)")
    parser.add_argument("--folder", type=Path, help="keep the synthetic models here")
    parser.add_argument("--json", metavar="FILE", help="write a row per model; - for stdout")
    parser.add_argument("--check", action="store_true", help=f"exit 1 below a ratio of {MIN_RATIO}")
    args = parser.parse_args(argv)
    unknown = set(args.models.split(",")) - CASES.keys()
    if unknown:
        parser.error(f"--models: {', '.join(sorted(unknown))} is none of {', '.join(CASES)}")
    if args.rounds < 2:
        parser.error("--rounds: give 2 or more, as a spread needs")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    described = machine.describe()
    print(machine.one_line(described), file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        with model_of(name, args.folder) as path:
            speeds = measure(path, CASES[name].prompt, args)
        say(name, speeds)
        rows.append(row_of(name, speeds, args) | {"machine": described})
    if args.json is not None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        sys.stdout.write(text) if args.json == "-" else Path(args.json).write_text(text)
    return 1 if args.check and any(row["ratio"] < MIN_RATIO for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
