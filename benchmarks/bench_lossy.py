#!/usr/bin/env python3
"""What lossy rules gain and cost: tokens per second and KL divergence, beside exact computation.

    python benchmarks/bench_lossy.py --json >> benchmarks/results/lossy.jsonl

Each round runs `pyspac quality`: exact computation and every rule take turns over the same text, one token a
forward. Two ways to treat an expert that is not on the device, which is the CPU behind a
link of 1 GB/s (emulated):

    fetch   the layer waits for its copy (`lru+fetch`), as where the host computes no experts
    host    the host computes it: pyspac's own way

A ratio is the median over rounds of (the rule's speed / exact computation's in the same round).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

import machine

LINK: Final = "copy_gb_s = 1.0\n"
WAYS: Final = {"fetch": LINK + 'baseline = "lru+fetch"\n', "host": LINK}
RULES: Final = (
    *("drop:4", "drop:3", "drop:2", "drop:1"),
    *("substitute:0.02", "substitute:0.2", "route:0.1", "route:0.2", "route:0.4"),
)
EXACT: Final = "none"

Row = dict[str, Any]


def one_round(args: argparse.Namespace, way: str, rules: list[str]) -> Row:
    """What `pyspac quality` says, as JSON. Raises CalledProcessError."""
    argv = [sys.executable, "-m", "pyspac", "quality", "-m", args.model, "-f", args.text, "-dev", "emulated"]
    argv += ["--cache", args.cache, "--policy", WAYS[way], "--json", "-"]
    for rule in rules:
        argv += ["--lossy", rule]
    found: Row = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def rows_of(way: str, rounds: list[Row]) -> list[Row]:
    """One per rule, exact computation first; tokens per second as [lowest, median, highest]."""
    exact = [one["exact_tokens_per_s"] for one in rounds]
    by_rule: dict[str, list[Row]] = {}
    for one in rounds:
        for row in one["rows"]:
            by_rule.setdefault(row["lossy"], []).append(row)
    rows = [{"lossy": EXACT, "kl": 0.0, "same_top_share": 1.0} | speeds(exact, exact)]
    for rule, of_rule in by_rule.items():
        found = {
            "kl": round(median(row["kl_divergence"] for row in of_rule), 5),
            "same_top_share": round(median(row["same_top_share"] for row in of_rule), 4),
        }
        rows.append({"lossy": rule} | found | speeds([row["tokens_per_s"] for row in of_rule], exact))
    return [{"bench": "lossy", "way": way} | row for row in rows]


def speeds(values: list[float], exact: list[float]) -> Row:
    ratios = [value / other for value, other in zip(values, exact, strict=True)]
    return {
        "tps": [round(of(values), 1) for of in (min, median, max)],
        "ratio": [round(of(ratios), 3) for of in (min, median, max)],
    }


def measure(args: argparse.Namespace) -> list[Row]:
    rules = args.rules or [*RULES, *([f"lowbit:1:{args.copy}"] if args.copy else [])]
    rounds: dict[str, list[Row]] = {way: [] for way in args.ways}
    for i in range(args.rounds):
        for way, found in rounds.items():
            found.append(one_round(args, way, rules[i % len(rules) :] + rules[: i % len(rules)]))
            print(f"round {i + 1}/{args.rounds}, {way}", file=sys.stderr)
    return [row for way, found in rounds.items() for row in rows_of(way, found)]


def print_table(rows: list[Row]) -> None:
    print(
        f"{'way':6} {'rule':16} {'KL':>8} {'same best':>9} {'tokens/s':>9} {'speed/exact':>12} {'range':>12}"
    )
    for row in rows:
        low, middle, high = row["ratio"]
        print(
            f"{row['way']:6} {row['lossy']:16} {row['kl']:8.4f} {row['same_top_share']:9.1%} "
            f"{row['tps'][1]:9.1f} {middle:12.3f} {f'{low:.3f}..{high:.3f}':>12}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=machine.REPOSITORY / "pyspac/models/demo-moe.gguf")
    parser.add_argument("--copy", type=Path, help="the model in fewer bits, for lowbit")
    parser.add_argument(
        "--text", type=Path, default=machine.REPOSITORY / "benchmarks/papers/synthetic_routing.py"
    )
    parser.add_argument("--cache", default="25%", help="as of pyspac run (default: 25%%)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rules", nargs="+", help="default: drop, substitute and route at several strengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds cannot be {args.rounds}: give 1 or more")
    described = machine.describe()
    setting = {
        "model": args.model.name, "cache": args.cache, "text_bytes": args.text.stat().st_size,
        "n_rounds": args.rounds, "machine": described,
    }  # fmt: skip
    rows = measure(args)
    if args.json:
        for row in rows:
            short = {"lossy": row["lossy"].replace(str(args.copy), args.copy.name)} if args.copy else {}
            print(json.dumps(row | short | setting))
    else:
        print(machine.one_line(described))
        print_table(rows)


if __name__ == "__main__":
    main()
