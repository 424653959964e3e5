"""Ways to run one model, timed in turns: their options in, tokens per second of each round out.

All ways are loaded at once, and each round runs every one of them on the same prompt, so that whatever
disturbs the machine disturbs them alike. Ratios are taken round by round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median, quantiles

from pyspac.errors import PyspacError
from pyspac.generate.options import RunOptions
from pyspac.generate.session import Session

OnRound = Callable[[int], None]  # rounds done


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some measurements, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """At least two values."""
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of every way, round by round; decoding alone, as `Metrics.tps`."""

    tps: Mapping[str, list[float]]

    def of(self, name: str) -> Spread:
        return Spread.of(self.tps[name])

    def ratio(self, name: str, other: str) -> Spread:
        """How many times as fast as `other`."""
        return Spread.of([a / b for a, b in zip(self.tps[name], self.tps[other], strict=True)])

    def ratio_to_best(self, name: str) -> Spread:
        """To the fastest of the others."""
        others = [other for other in self.tps if other != name]
        return min((self.ratio(name, other) for other in others), key=lambda spread: spread.median)


def stock_and_own(options: RunOptions) -> dict[str, RunOptions]:
    """The ways that a user without a device has: llama.cpp in both layouts, and `options` as they are."""
    stock = replace(options, stock=True)
    return {"stock": stock, "repacked": replace(stock, repack=True), "pyspac": options}


def compare(
    ways: Mapping[str, RunOptions], prompt: str, n_rounds: int, on_round: OnRound = lambda n: None
) -> Speeds:
    """Run every way once per round, in changing order, after a first run that does not count."""
    tps: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(Session(options)) for name, options in ways.items()}
        for i in range(n_rounds + 1):
            for name in _rotated(list(ways), i):
                speed = _speed(sessions[name], prompt)
                if i > 0:
                    tps[name].append(speed)
            on_round(i)
    return Speeds(tps)


def _rotated(names: list[str], n: int) -> Iterator[str]:
    first = n % len(names)
    yield from names[first:]
    yield from names[:first]


def _speed(session: Session, prompt: str) -> float:
    """Of decoding; from the second time on the context has the prompt."""
    speed = session.generate(session.tokenize(prompt)).metrics.tps
    if speed is None:
        raise PyspacError("the model ends its text at once: nothing can be timed; give another prompt")
    return speed
