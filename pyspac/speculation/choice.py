"""Which of all draft lengths is chosen, once they are judged.

In: `Option`s, and what the loss ledger allows. Out: a `Choice`. Of all lengths that the ledger can afford the
one with the highest utility, unless others have a higher score: of these the one that risks least.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspac.ledger import LossLedger
from pyspac.speculation.controller import Phase


class Option(NamedTuple):
    """A draft length, judged."""

    n_draft: int
    utility: float  # expected tokens per plain step's time
    score: float  # log(utility), and the appetite's share of its standard deviation
    loss: float  # plain steps that a step may lose, if its time is far from what was thought
    once: float = 0.0  # that the first step loses besides


class Price(NamedTuple):
    """What a step takes that drafts so many tokens."""

    n_draft: int
    cost: float  # plain steps; no step is shorter than one with fewer tokens
    variance: float  # of its logarithm


class Choice(NamedTuple):
    """A draft length, chosen."""

    n_draft: int
    phase: Phase
    why: str
    utilities: dict[int, float]  # of all lengths


def candidates(n_max: int) -> list[int]:
    """1 2 3 5 8 13 ... and the cap: lengths between two of them gain too little to change widths for."""
    lengths, k, after = [], 1, 2
    while k < n_max:
        lengths.append(k)
        k, after = after, k + after
    return [*lengths, n_max] if n_max else []


def pick(options: list[Option], ledger: LossLedger) -> Choice:
    """Choose the best forecast, or the least risk that may be better."""
    allowed = [
        option for option in options if option.n_draft == 0 or ledger.can_lose(option.loss, option.once)
    ]
    likeliest = max(allowed, key=lambda option: option.utility)
    bolder = [option for option in allowed if option.score > likeliest.score]
    best = min(bolder, key=lambda option: option.loss) if bolder else likeliest
    boldest = max(options, key=lambda option: option.score)
    phase: Phase = "probe"
    why = f"may be better than K = {likeliest.n_draft}: that is not sure"
    if best.n_draft == 0 and boldest.n_draft > 0:
        phase, why = "hold", f"the loss ledger does not allow K = {boldest.n_draft}, which may pay"
    elif best is likeliest:
        phase, why = "choose", "the best forecast" + _ruled_out(best, options)
    elif best.n_draft == 0:
        phase, why = "baseline", "the plain step's time is not sure"
    return Choice(best.n_draft, phase, why, {option.n_draft: option.utility for option in options})


def _ruled_out(best: Option, options: list[Option]) -> str:
    """For `--explain`: the length that has a higher utility, if there is one."""
    likeliest = max(options, key=lambda option: option.utility)
    if likeliest.utility <= best.utility:
        return ""
    return f" but for K = {likeliest.n_draft}, which the loss ledger does not allow"
