"""Which of all draft lengths is chosen, once they are judged.

In: `Option`s, and what the loss ledger allows. Out: a `Choice`. Of all lengths that the ledger can afford the
one with the highest utility, unless others have a higher score: of these the one that risks least.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from pyspac.ledger import LossLedger
from pyspac.speculation.controller import Phase


class Option(NamedTuple):
    """A draft length, judged."""

    n_draft: int
    utility: float  # expected tokens per plain step's time
    score: float  # log(utility), and the appetite's share of its standard deviation
    loss: float  # plain steps that a step may lose, if its time is far from what was thought
    once: float = 0.0  # that the first step loses besides


PLAIN: Final = Option(0, 1.0, 0.0, 0.0)


class Price(NamedTuple):
    """What a step takes that drafts so many tokens."""

    n_draft: int
    cost: float  # plain steps; no step is shorter than one with fewer tokens
    variance: float  # of its logarithm
    far: float  # how many times as long it takes, if its time is far from what was thought


class Choice(NamedTuple):
    """A draft length, chosen. It explains itself when it is asked: most choices are made and not kept."""

    n_draft: int
    phase: Phase
    options: list[Option]  # of which it is one
    other: int = 0  # the length that it was preferred to, or that the ledger ruled out; itself: none was
    place: str = ""  # of the text, that it holds for

    @property
    def utilities(self) -> dict[int, float]:
        """Of all lengths."""
        return {option.n_draft: option.utility for option in self.options}

    @property
    def why(self) -> str:
        """For `--explain`."""
        why = {
            "probe": f"may be better than K = {self.other}: that is not sure",
            "hold": f"the loss ledger does not allow K = {self.other}, which may pay",
            "choose": "the best forecast" + self._ruled_out(),
            "baseline": "the plain step's time is not sure",
        }[self.phase]
        return f"{why}; {self.place}" if self.place else why

    def _ruled_out(self) -> str:
        """The length with the highest utility, if it is another one."""
        if self.other == self.n_draft:
            return ""
        return f" that the loss ledger allows: without it K = {self.other}"


def judged(
    price: Price, gained: float, unsure: float, cost: float, appetite: float, once: float = 0.0
) -> Option:
    """A length above 0. In plain steps: what it gained, the standard deviation of that, and the cost."""
    utility = gained / cost
    score = math.log(utility) + appetite * math.sqrt(price.variance + (unsure / gained) ** 2)
    return Option(price.n_draft, utility, score, cost * price.far - (gained - unsure), once)


def candidates(n_max: int) -> list[int]:
    """1 2 3 5 8 13 ... and the cap: lengths between two of them gain too little to change widths for."""
    lengths, k, after = [], 1, 2
    while k < n_max:
        lengths.append(k)
        k, after = after, k + after
    return [*lengths, n_max] if n_max else []


def pick(options: list[Option], ledger: LossLedger, place: str = "") -> Choice:
    """Choose the best forecast, or the least risk that may be better."""
    can_lose = ledger.can_lose
    allowed = [option for option in options if option.n_draft == 0 or can_lose(option.loss, option.once)]
    likeliest = max(allowed, key=lambda option: option.utility)
    bolder = [option for option in allowed if option.score > likeliest.score]
    best = min(bolder, key=lambda option: option.loss) if bolder else likeliest
    if best.n_draft == 0 and (boldest := max(options, key=lambda option: option.score)).n_draft > 0:
        return Choice(0, "hold", options, boldest.n_draft, place)
    if best is likeliest:
        dearer = max(options, key=lambda option: option.utility)
        is_ruled_out = dearer.utility > best.utility
        other = dearer.n_draft if is_ruled_out else best.n_draft
        return Choice(best.n_draft, "choose", options, other, place)
    return Choice(best.n_draft, "probe" if best.n_draft else "baseline", options, likeliest.n_draft, place)
