"""Draws the README's figure from measured rows: what a user gets without a flag, beside llama.cpp.

    python benchmarks/figures.py         # writes docs/speed.svg

In: the last run of `bench_defaults.py` and of `bench_tiers.py` in benchmarks/results/. Out: tokens per second
of a model in memory, and of one that is larger than memory.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

REPOSITORY: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = REPOSITORY / "benchmarks/results"
FIGURE: Final = REPOSITORY / "docs/speed.svg"
OURS: Final = "#0b6e4f"
THEIRS: Final = "#d1782b"
LAYOUTS: Final = {"q8_0": "1.3 GB, Q8_0", "q4_k": "1.3 GB, Q4_K"}
SHARES: Final = {0.5: "3.1 GB, memory for\nhalf of its experts", 0.25: "3.1 GB, memory for\na quarter"}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens per second of one model; `theirs`: of the faster llama.cpp, where there are two."""

    title: str
    ours: float
    theirs: float


def rows_of(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def in_memory(rows: list[Row]) -> list[Pair]:
    last = {row["model"]: row for row in rows}
    return [
        Pair(title, row["pyspac_tps"], max(row["repacked_tps"], row["stock_tps"]))
        for title, row in ((title, last[model]) for model, title in LAYOUTS.items())
    ]


def larger_than_memory(rows: list[Row]) -> list[Pair]:
    """Of each share the newest row."""
    decoding = {
        row["memory_share"]: row
        for run in rows
        for row in run["rows"]
        if row["phase"] == "decode" and row["predict"] == "none"
    }
    return [
        Pair(title, decoding[share]["pyspac_tps"], decoding[share]["stock_tps"])
        for share, title in SHARES.items()
    ]


def draw_panel(panel: Axes, title: str, pairs: list[Pair]) -> None:
    for i, pair in enumerate(pairs):
        for dx, value, colour, label in (
            (-0.2, pair.theirs, THEIRS, "llama.cpp"),
            (0.2, pair.ours, OURS, "pyspac"),
        ):
            bar = panel.bar(i + dx, value, 0.38, color=colour, label=label if i == 0 else None)
            panel.bar_label(bar, fmt="%.3g", fontsize=9, padding=2)
    panel.set_xticks(range(len(pairs)), [pair.title for pair in pairs], fontsize=9)
    panel.set_title(title, fontsize=10)
    panel.set_ylim(0, 1.15 * max(pair.ours for pair in pairs))
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=FIGURE)
    output: Path = parser.parse_args().output
    plt.rcParams["svg.hashsalt"] = "pyspac"  # the same rows give the same file
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.2))
    draw_panel(panels[0], "in memory", in_memory(rows_of("defaults")))
    draw_panel(panels[1], "larger than memory", larger_than_memory(rows_of("tiers")))
    panels[0].set_ylabel("tokens per second")
    panels[0].legend(frameon=False, fontsize=9, loc="upper left")
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})
    print(output)


if __name__ == "__main__":
    main()
