"""Ways to run one model, timed in turns: their options and prompts in, speeds of each round out.

All ways are loaded at once, and each round runs every one of them on the same prompts, so that whatever
disturbs the machine disturbs them alike; ratios are taken round by round. Where that needs more memory than
there is, one way runs after the other, and ratios say less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from pyspac.errors import PyspacError
from pyspac.server.options import ServeOptions
from pyspac.talk.client import Client
from pyspac.talk.conversation import n_ctx_of
from pyspac.talk.interrupt import Interrupt

OnRound = Callable[[int], None]  # rounds done
OnTurn = Callable[[], None]  # one more prompt done


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some measurements, the quartiles around it, and the least and the greatest."""

    median: float
    low: float
    high: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """At least two values."""
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high, min(values), max(values))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of every way, round by round; only decoding, as `Metrics.tps`."""

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


@dataclass(slots=True)
class _Sums:
    """Tokens and seconds of one way in one round."""

    n_prompt: int = 0
    prompt_s: float = 0.0
    n_tokens: int = 0
    s: float = 0.0
    n_draft: int = 0
    n_accepted: int = 0

    def add(self, timings: Mapping[str, Any]) -> None:
        """A server's, of one answer."""
        self.n_prompt += timings["prompt_n"]
        self.prompt_s += timings["prompt_ms"] / 1e3
        self.n_tokens += max(0, timings["predicted_n"] - 1)
        self.s += timings["predicted_ms"] / 1e3
        self.n_draft += timings.get("draft_n", 0)
        self.n_accepted += timings.get("draft_n_accepted", 0)


@dataclass(frozen=True, slots=True)
class Turns:
    """All measurements of a comparison. Of several prompts tokens are added up, and seconds."""

    _rounds: dict[str, list[dict[str, _Sums]]] = field(default_factory=dict)  # way -> round -> prompt

    def add(self, way: str, i_round: int, prompt: str, timings: Mapping[str, Any]) -> None:
        rounds = self._rounds.setdefault(way, [])
        while len(rounds) <= i_round:
            rounds.append({})
        rounds[i_round].setdefault(prompt, _Sums()).add(timings)

    def generation(self, prompt: str | None = None) -> Speeds:
        """After one of the prompts; None: after all of them."""
        return self._speeds(prompt, lambda sums: (sums.n_tokens, sums.s))

    def prompts(self) -> Speeds:
        """Of processing prompts, the first token included."""
        return self._speeds(None, lambda sums: (sums.n_prompt, sums.prompt_s))

    def acceptance(self, way: str) -> float | None:
        """The share of its drafts that held, after all prompts; None: nothing was drafted."""
        sums = [sums for of_round in self._rounds[way] for sums in of_round.values()]
        n_draft = sum(one.n_draft for one in sums)
        return sum(one.n_accepted for one in sums) / n_draft if n_draft else None

    def _speeds(self, prompt: str | None, part: Callable[[_Sums], tuple[int, float]]) -> Speeds:
        def speed(of_round: dict[str, _Sums]) -> float:
            parts = [part(sums) for name, sums in of_round.items() if prompt in (None, name)]
            if not (seconds := sum(s for _, s in parts)):
                raise PyspacError(
                    "the model ends its text at once: nothing can be timed; give another model or prompt"
                )
            return sum(n for n, _ in parts) / seconds

        return Speeds({way: [speed(one) for one in rounds] for way, rounds in self._rounds.items()})


def stock_and_own(options: ServeOptions) -> dict[str, ServeOptions]:
    """The ways that a user without a device has: llama.cpp in both layouts, and `options` as they are."""
    stock = replace(options, stock=True)
    plain = replace(stock, passed=(*stock.passed, "--no-repack"))
    return {"stock": plain, "repacked": stock, "pyspac": options}


def compare(
    ways: Mapping[str, ServeOptions],
    prompt: str,
    n_rounds: int,
    n_predict: int,
    on_round: OnRound = lambda n: None,
) -> Speeds:
    """Decoding after one prompt, every way once per round."""
    n_turns = 0

    def on_turn() -> None:
        nonlocal n_turns
        n_turns += 1
        if n_turns % len(ways) == 0:
            on_round(n_turns // len(ways) - 1)

    return take_turns(ways, {"": prompt}, n_rounds, n_predict, on_turn).generation()


def take_turns(
    ways: Mapping[str, ServeOptions],
    prompts: Mapping[str, str],
    n_rounds: int,
    n_predict: int,
    on_turn: OnTurn = lambda: None,
    *,
    at_once: bool = True,
) -> Turns:
    """Run every way on every prompt once per round, greedily, after a first round that does not count.

    `at_once`: all are loaded together, and take turns in changing order; else one is done before the next.
    Prompts are processed anew each time. Raises PyspacError.
    """
    from pyspac.talk.own_server import OwnServer  # loads the engine

    turns = Turns()
    for names in [list(ways)] if at_once else [[name] for name in ways]:
        with ExitStack() as stack, Interrupt.watch() as interrupt:
            servers = {name: stack.enter_context(OwnServer(ways[name], interrupt)) for name in names}
            texts = {name: _fitting(own.client, prompts, n_predict) for name, own in servers.items()}
            for i in range(n_rounds + 1):
                for prompt in prompts:
                    for name in _rotated(names, i):
                        timings = _time(servers[name].client, texts[name][prompt], n_predict, interrupt)
                        if i > 0:
                            turns.add(name, i - 1, prompt, timings)
                        on_turn()
    return turns


def _time(client: Client, prompt: Sequence[int], n_predict: int, interrupt: Interrupt) -> dict[str, Any]:
    """The server's times of one answer."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "cache_prompt": False, "stream": True}
    timings: dict[str, Any] = {}
    with interrupt.cancels(client):
        for event in client.stream("/completion", body):
            timings = event.get("timings", timings)
    if interrupt:
        raise KeyboardInterrupt
    return timings


def _fitting(client: Client, prompts: Mapping[str, str], n_predict: int) -> dict[str, list[int]]:
    """The tokens of prompts, as many as leave room for what is generated."""
    room = max(1, n_ctx_of(client) - n_predict)
    return {
        name: client.post("/tokenize", {"content": text, "add_special": True})["tokens"][:room]
        for name, text in prompts.items()
    }


def _rotated(names: list[str], n: int) -> Iterator[str]:
    first = n % len(names)
    yield from names[first:]
    yield from names[:first]
