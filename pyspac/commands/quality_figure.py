"""A row of `pyspac quality`, and its figure: speed against KL divergence, a line for each kind of rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspac.errors import PyspacError

_FOLDER: Final = re.compile(r"[^:]*/")  # of a FILE


@dataclass(frozen=True, slots=True)
class Row:
    """One rule beside exact computation, over the same tokens."""

    lossy: str
    perplexity: float
    perplexity_exact: float
    kl_divergence: float  # nats per token, of the exact distribution from this one
    same_top_share: float  # of tokens whose likeliest one is the same
    tokens_per_s: float


def draw(rows: Sequence[Row], exact_per_s: float, path: Path) -> None:
    """Write the figure. Raises PyspacError without matplotlib, or where it cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PyspacError("a figure needs matplotlib; install it, or leave --png out") from error
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    kinds = dict.fromkeys(row.lossy.partition(":")[0] for row in rows)
    for kind in kinds:
        of_kind = [row for row in rows if row.lossy.startswith(f"{kind}:")]
        found = sorted(of_kind, key=lambda row: row.kl_divergence)
        xs = [0.0, *(row.kl_divergence for row in found)]
        ys = [exact_per_s, *(row.tokens_per_s for row in found)]
        axes.plot(xs, ys, marker=".", label=kind)
        for row in found:
            strength = _FOLDER.sub("", row.lossy.partition(":")[2])
            axes.annotate(strength, (row.kl_divergence, row.tokens_per_s))
    axes.axhline(exact_per_s, linestyle=":", color="gray", label="exact")
    axes.set(xlabel="KL divergence from exact, nats per token", ylabel="tokens/s", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise PyspacError(f"{path} cannot be written ({error.strerror})") from error
