"""A figure of a paper beside ours: numbers by method, and whether both put the methods in the same order.

Each module of this folder has FIGURES: the paper's name of a figure -> a function that returns its claims.
`main` makes a command of it:

    python benchmarks/papers/specmd.py                           # all figures
    python benchmarks/papers/specmd.py --figure "Figure 4"       # one
    python benchmarks/papers/moe_spac.py --traces DIR            # recorded routing: qwen.route.csv
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from pyspac.errors import ConfigError, PyspacError
from pyspac.lab.trace import Trace
from pyspac.lab.trace_file import read_trace

TIE: Final = 0.02  # numbers that differ by less say nothing about the order


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a paper says and what we get. Numbers of `paper` and `ours` need not have the same unit."""

    what: str  # is compared
    source: str  # where the paper says so: a table, a figure's caption, the text of a section
    paper: Mapping[str, float]  # by method; ranks where the paper's text gives only the order
    ours: Mapping[str, float]
    unit: str = ""  # of the paper's numbers
    our_unit: str = ""  # "": the same
    how: str = "replayed, synthetic routing"
    why: str = ""  # where the order differs
    ties: float = TIE

    def pairs(self) -> tuple[int, int, list[str]]:
        """Return how many pairs of methods have the paper's order, of how many, and which have not."""
        shared = [name for name in self.paper if name in self.ours]
        n_same, n, other = 0, 0, []
        for a, b in combinations(shared, 2):
            theirs = _order(self.paper[a], self.paper[b], self.ties)
            if theirs == 0:
                continue
            n += 1
            if theirs == _order(self.ours[a], self.ours[b], 0.0):
                n_same += 1
            else:
                other.append(f"{a}, {b}")
        return n_same, n, other

    def verdict(self) -> str:
        """Say in a word whether the order is the paper's."""
        n_same, n, _ = self.pairs()
        if n == 0:
            return "no order"
        return "agrees" if n_same == n else f"{n_same} of {n} pairs"


def _order(a: float, b: float, ties: float) -> int:
    if abs(a - b) <= ties * max(abs(a), abs(b)):
        return 0
    return 1 if a > b else -1


@cache
def _read(path: Path) -> Trace:
    return read_trace(path)


@dataclass(frozen=True, slots=True)
class Source:
    """Where routing comes from."""

    traces: Path | None = None  # a folder with qwen.route.csv

    def qwen(self) -> Trace | None:
        """Return the recorded trace of Qwen3-30B-A3B; None: only synthetic ones are there."""
        if self.traces is None:
            return None
        path = self.traces / "qwen.route.csv"
        if not path.is_file():
            raise ConfigError("--traces", str(self.traces), f"a folder with {path.name}")
        return _read(path)

    @property
    def how(self) -> str:
        """Say what was replayed."""
        return "replayed, synthetic routing" if self.traces is None else "replayed, recorded routing"


Figures = Mapping[str, Callable[[Source], Sequence[Claim]]]


def number(value: float) -> str:
    """Return three digits, as a table shows them."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def show(figure: str, claim: Claim) -> None:
    """Print one claim."""
    print(f"{figure}: {claim.what}")
    print(f"  the paper: {claim.source}; ours: {claim.how}")
    ours = claim.our_unit or claim.unit
    heads = [f"{side}, {unit}" if unit else side for side, unit in (("paper", claim.unit), ("ours", ours))]
    print(f"  {'':34} {heads[0]:>24}  {heads[1]}")
    for name in dict.fromkeys([*claim.paper, *claim.ours]):
        cells = [number(side[name]) if name in side else "-" for side in (claim.paper, claim.ours)]
        print(f"  {name:34} {cells[0]:>24}  {cells[1]}")
    other = claim.pairs()[2]
    print(f"  order: {claim.verdict()}" + (f"; not {'; '.join(other[:4])}" if other else ""))
    if other and claim.why:
        print(f"  why: {claim.why}")
    print()


def find(figures: Figures, name: str) -> list[str]:
    """Return the figures that are asked for: all, or one by its name or number."""
    if not name:
        return list(figures)
    found = [figure for figure in figures if name in (figure, figure.split()[-1])]
    if not found:
        raise ConfigError("--figure", name, ", ".join(figures))
    return found


def main(paper: str, figures: Figures) -> None:
    """Run a module's command."""
    parser = argparse.ArgumentParser(description=f"Figures of {paper}, the paper's numbers beside ours.")
    parser.add_argument("--figure", default="", help=f"one of: {', '.join(figures)}")
    parser.add_argument("--traces", type=Path, help="folder with qwen.route.csv; without: synthetic routing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    try:
        rows: list[dict[str, Any]] = []
        source = Source(args.traces)
        for figure in find(figures, args.figure):
            for claim in figures[figure](source):
                rows.append({"figure": figure, **asdict(claim), "order": claim.verdict()})
                if not args.json:
                    show(figure, claim)
        if args.json:
            print(json.dumps({"paper": paper, "claims": rows}, indent=1))
    except (PyspacError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
