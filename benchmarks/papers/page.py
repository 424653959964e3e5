"""Writes docs/papers.md: every figure of every module of this folder, the paper's numbers beside ours.

python benchmarks/papers/page.py             # a few minutes
python benchmarks/papers/page.py --check     # writes nothing; exit code 1 if the page would change
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Final

from claims import Claim, Figures, Source, number

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
PAPERS: Final = {  # module: the paper
    "moe_spac": "MoE-SpAc (arXiv 2603.09983)",
    "cascade": "Cascade",
    "sp_moe": "SP-MoE (arXiv 2510.10302)",
    "specmd": "SpecMD",
    "gamma_tolerance": "gamma-tolerance",
}
HEAD: Final = """# The papers' figures, beside ours

What five papers report, and what replays, simulations and formulas give here under the conditions that each
paper names. *Order*: whether the methods come in the paper's order; "5 of 6 pairs": so many pairs of methods
that differ in the paper. Numbers stand in the order of the methods; ranks stand where a paper's text gives
only the order, as its pictures were not measured out.

Nothing here is measured: routing is synthetic (`benchmarks/papers/synthetic_routing.py`), times are
predicted, streams of drafts simulated. Each command prints its figures with their source in the paper,
`--figure "Figure 4"` one of them. `python benchmarks/papers/page.py` writes this page. Results on recorded
routing: [policies.md](policies.md).
"""


@cache
def claims(module: str) -> list[tuple[str, Claim]]:
    """Return a module's claims with the figures that they belong to; each is made once."""
    figures: Figures = importlib.import_module(module).FIGURES
    return [(figure, claim) for figure, make in figures.items() for claim in make(Source())]


def cells(claim: Claim) -> list[str]:
    """Return what is compared, the methods and both sides' numbers."""
    names = [name for name in claim.paper if name in claim.ours]
    theirs, ours = ("/".join(number(side[name]) for name in names) for side in (claim.paper, claim.ours))
    unit = f" ({claim.unit})" if claim.unit and claim.unit != "rank" else ""
    return [claim.what, "; ".join(names), theirs + (" (rank)" if claim.unit == "rank" else unit), ours]


def section(module: str, paper: str) -> Iterator[str]:
    """Give the lines of one paper, and of why it is otherwise."""
    yield f"\n## {paper}\n"
    yield f"    python benchmarks/papers/{module}.py\n"
    yield "| figure | compared | methods | paper | ours | order |"
    yield "| --- | --- | --- | --- | --- | --- |"
    reasons: dict[str, list[str]] = {}
    for figure, claim in claims(module):
        yield "| " + " | ".join([figure, *cells(claim), claim.verdict()]) + " |"
        if claim.why and claim.pairs()[2]:
            reasons.setdefault(claim.why, []).append(figure)
    yield ""
    for why, where in reasons.items():
        yield from wrap(f"- {', '.join(dict.fromkeys(where))}: {why}.", 110, subsequent_indent="  ")


def summary() -> str:
    """Return how much agrees in all."""
    counts = [claim.pairs()[:2] for module in PAPERS for _, claim in claims(module)]
    whole = sum(same == n for same, n in counts)
    pairs = sum(same for same, _ in counts), sum(n for _, n in counts)
    return (
        f"\nIn all, {whole} of {len(counts)} comparisons agree, {pairs[0]} of {pairs[1]} pairs of methods.\n"
    )


def make_page() -> str:
    """Return the page."""
    lines = [line for module, paper in PAPERS.items() for line in section(module, paper)]
    return HEAD + summary() + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/papers.md.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the page would change"
    )
    args = parser.parse_args()
    page = make_page()
    if args.check:
        is_same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page
        print(f"{PAGE}: {'as it should be' if is_same else 'would change'}")
        return int(not is_same)
    PAGE.write_text(page, encoding="utf-8")
    print(f"{PAGE}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
