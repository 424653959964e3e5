"""Draws the README's figure from measured rows: decoding on the CPU, beside llama.cpp plain and repacked.

    python benchmarks/figures.py         # writes docs/speed.svg

Only rows of one run may be drawn together, so the last run in benchmarks/results/host-experts.jsonl that had
all three contenders is taken (`bench_host_experts.py --repacked --json -`).
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

REPOSITORY: Final = Path(__file__).resolve().parent.parent
ROWS: Final = REPOSITORY / "benchmarks/results/host-experts.jsonl"
FIGURE: Final = REPOSITORY / "docs/speed.svg"

CONTENDERS: Final = {  # column: label, colour, marker
    "spac_tps": ("pyspac --device none", "#0b6e4f", "o"),
    "repacked_tps": ("llama.cpp, weights repacked (its default)", "#d1782b", "s"),
    "stock_tps": ("llama.cpp, weights as in the file", "#7a7a7a", "^"),
}
WIDEST: Final = 9  # tokens per step: a token and eight drafts

Row = dict[str, Any]


def rows_of_last_run(path: Path) -> list[Row]:
    """The rows of the last run in which every contender took part, up to WIDEST tokens per step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    whole = [row for row in rows if CONTENDERS.keys() <= row.keys() and row["width"] <= WIDEST]
    runs = [list(run) for _, run in groupby(whole, key=lambda row: row["machine"]["pyspac_commit"])]
    if not runs:
        raise SystemExit(f"{path} has no run with --repacked")
    return runs[-1]


def draw(rows: list[Row], path: Path) -> None:
    """One panel per type of weights: tokens per second over tokens per step."""
    types = list(dict.fromkeys(row["type"] for row in rows))
    figure, panels = plt.subplots(1, len(types), figsize=(4.2 * len(types), 3.4), sharey=True, squeeze=False)
    for panel, name in zip(panels[0], types, strict=True):
        draw_type(panel, [row for row in rows if row["type"] == name])
        panel.set_title(name.upper(), fontsize=10)
    panels[0][0].set_ylabel("tokens per second")
    panels[0][0].set_ylim(0, 1.12 * max(row["spac_tps"] for row in rows))
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, metadata={"Date": None})


def draw_type(panel: Axes, rows: list[Row]) -> None:
    widths = [row["width"] for row in rows]
    for column, (label, colour, marker) in CONTENDERS.items():
        panel.plot(widths, [row[column] for row in rows], marker=marker, color=colour, label=label, ms=5)
    for row in rows:
        label = f"{min(row['ratio'], row['ratio_repacked']):.1f}x"  # medians of ratios within a round
        panel.annotate(label, (row["width"], row["spac_tps"]), (0, 6), textcoords="offset points", fontsize=8,
                       ha="center")  # fmt: skip
    panel.set_xticks(widths)
    panel.set_xlabel("tokens per step (1 + drafted tokens)")
    panel.grid(axis="y", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="rows of bench_host_experts.py")
    parser.add_argument("--output", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    plt.rcParams["svg.hashsalt"] = "pyspac"  # the same rows give the same file
    plt.rcParams["svg.fonttype"] = "none"  # text stays text
    draw(rows_of_last_run(arguments.rows), arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
