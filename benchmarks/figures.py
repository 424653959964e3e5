"""Draws the docs' figures from measured rows.

    python benchmarks/figures.py         # writes docs/speed.svg and docs/lossy.svg

In: the newest rows of `bench_defaults.py`, `bench_tiers.py` and `bench_lossy.py` in benchmarks/results/. Out:
what a user gets without a flag beside llama.cpp, in memory and larger; lossy rules' speed against cost.
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
from matplotlib.figure import Figure

REPOSITORY: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = REPOSITORY / "benchmarks/results"
DOCS: Final = REPOSITORY / "docs"
OURS: Final = "#0b6e4f"
THEIRS: Final = "#d1782b"
LAYOUTS: Final = {"q8_0": "1.3 GB, Q8_0", "q4_k": "1.3 GB, Q4_K"}
WAYS: Final = {"fetch": "misses are copied over 1 GB/s", "host": "the host computes misses"}
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


def draw_lossy(panel: Axes, title: str, rows: list[Row]) -> None:
    """Speed against KL divergence, a line for each kind of rule."""
    for kind in dict.fromkeys(row["lossy"].partition(":")[0] for row in rows if row["lossy"] != "none"):
        found = sorted((row for row in rows if row["lossy"].startswith(kind)), key=lambda row: row["kl"])
        xs = [0.0, *(max(0.0, row["kl"]) for row in found)]
        ys = [1.0, *(row["ratio"][1] for row in found)]
        panel.plot(xs, ys, marker=".", label=kind)
        for row, x, y in zip(found, xs[1:], ys[1:], strict=True):
            strength = row["lossy"].split(":")[1]
            panel.annotate(strength, (x, y), fontsize=7, textcoords="offset points", xytext=(3, 3))
    panel.axhline(1, linestyle=":", color="gray")
    panel.set_xscale("symlog", linthresh=0.01)
    panel.set_xlim(0, 2)
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("KL divergence, nats per token", fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=DOCS, help="a folder (default: docs/)")
    output: Path = parser.parse_args().output
    plt.rcParams["svg.hashsalt"] = "pyspac"  # the same rows give the same file
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.2))
    draw_panel(panels[0], "in memory", in_memory(rows_of("defaults")))
    draw_panel(panels[1], "larger than memory", larger_than_memory(rows_of("tiers")))
    panels[0].set_ylabel("tokens per second")
    panels[0].legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, output / "speed.svg")
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.2), sharey=True)
    demo = [row for row in rows_of("lossy") if row["model"] == "demo-moe.gguf"]
    last = {(row["way"], row["lossy"]): row for row in demo}.values()
    for panel, (way, title) in zip(panels, WAYS.items(), strict=True):
        draw_lossy(panel, title, [row for row in last if row["way"] == way])
    panels[0].set_ylabel("speed, exact = 1")
    panels[0].legend(frameon=False, fontsize=9)
    save(figure, output / "lossy.svg")


if __name__ == "__main__":
    main()
