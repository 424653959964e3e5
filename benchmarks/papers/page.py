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

    python benchmarks/papers/moe_spac.py --figure "Figure 4"      # one figure, with its source in the paper
    python benchmarks/papers/page.py                              # writes this page

What five papers report, and what we get under the conditions that each names. Nothing here is measured:
routing is synthetic (`benchmarks/papers/synthetic_routing.py`), times are predicted, streams of drafts
simulated. Results on recorded routing: [policies.md](policies.md).

Numbers stand in the order of the methods; ranks stand where a paper's text gives only the order. *Order*:
whether the methods come in the paper's order; "5 of 6 pairs": so many of the pairs that differ in the paper.
"""


@cache
def claims(module: str) -> list[tuple[str, Claim]]:
    """Return a module's claims with the figures that they belong to; each is made once."""
    figures: Figures = importlib.import_module(module).FIGURES
    return [(figure, claim) for figure, make in figures.items() for claim in make(Source())]


def merged(found: list[tuple[str, Claim]]) -> Iterator[tuple[str, list[Claim]]]:
    """Give claims of one figure that compare the same methods together, for one row."""
    rows: dict[tuple[str, ...], list[Claim]] = {}
    for figure, claim in found:
        rows.setdefault((figure, claim.unit, *claim.paper), []).append(claim)
    for key, row in rows.items():
        yield key[0], row


def row(figure: str, same: list[Claim]) -> str:
    """Return a row: what is compared, the methods, both sides' numbers, the order."""
    names = [name for name in same[0].paper if name in same[0].ours]
    unit = f" ({same[0].unit})" if same[0].unit else ""
    theirs, ours = (
        "; ".join(once(["/".join(number(side[name]) for name in names) for side in sides]))
        for sides in ([claim.paper for claim in same], [claim.ours for claim in same])
    )
    n_same, n = sum(claim.pairs()[0] for claim in same), sum(claim.pairs()[1] for claim in same)
    order = "agrees" if n_same == n else f"{n_same} of {n} pairs"
    cells = [f"{figure}: {together([c.what for c in same])}: {'; '.join(names)}", theirs + unit, ours, order]
    return f"| {' | '.join(cells)} |"


def once(texts: list[str]) -> list[str]:
    """Return the texts, or one if they are all alike."""
    return texts[:1] if len(set(texts)) == 1 else texts


def together(texts: list[str]) -> str:
    """Return texts as one, what differs in the middle."""
    if len(texts) == 1:
        return texts[0]
    words = [text.split() for text in texts]
    first, last = min(words), max(words)
    before = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    rests = [" ".join(word[before:]) for word in words]
    return " ".join([*first[:before], "; ".join(rests)])


def section(module: str, paper: str) -> Iterator[str]:
    """Give the lines of one paper, and of why it is otherwise."""
    yield f"\n## {paper}\n"
    yield f"    python benchmarks/papers/{module}.py\n"
    yield "| compared | paper | ours | order |"
    yield "|---|---|---|---|"
    reasons: dict[str, list[str]] = {}
    for figure, same in merged(claims(module)):
        yield row(figure, same)
        for claim in same:
            if claim.why and claim.pairs()[2]:
                reasons.setdefault(claim.why, []).append(figure)
    yield ""
    for why, where in reasons.items():
        yield from wrap(
            f"- {', '.join(dict.fromkeys(where))}: {why}.",
            110,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )


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
