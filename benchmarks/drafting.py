"""Ways to draft beside each other: a llama-server of their own each, and what came of every request.

In: flags of `pyspac run`, prompts as tokens. Out: a `Timing` by way and text; ratios to plain decoding. Times
are those of decoding, from the first token to the last, as the server tells them; or the CPU time that its
process took meanwhile, for a machine that others use too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from pyspac.commands.bench_ways import Given
from pyspac.engine.step import StepRecord
from pyspac.errors import PyspacError
from pyspac.talk.answer import Answer, complete
from pyspac.talk.interrupt import Interrupt
from pyspac.talk.own_server import OwnServer

OFF: Final = "off"


@dataclass(slots=True)
class Timing:
    """What one way did with some requests."""

    n_tokens: int = 0
    seconds: float = 0.0
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    draft_us: float = 0.0  # drafting, and reading afterwards what was verified
    requests: list[float] = field(default_factory=list)  # seconds per token
    drafted_at: list[int] = field(default_factory=list)  # drafts that had a token at position 1, 2, ...
    held_at: list[int] = field(default_factory=list)  # of these, drafts whose token held

    @property
    def tps(self) -> float:
        return self.n_tokens / self.seconds

    def add(self, one: Timing) -> None:
        """Take in more requests."""
        for name in ("n_tokens", "seconds", "n_steps", "n_drafted", "n_accepted", "draft_us", "requests"):
            setattr(self, name, getattr(self, name) + getattr(one, name))
        self.drafted_at = _sums(self.drafted_at, one.drafted_at)
        self.held_at = _sums(self.held_at, one.held_at)

    def acceptance(self) -> list[float]:
        """By position: of the drafts that came so far, the share whose token held."""
        held = [*self.held_at, *([0] * (len(self.drafted_at) - len(self.held_at)))]
        return [round(h / n, 3) for h, n in zip(held, self.drafted_at, strict=True)]


def _sums(a: list[int], b: list[int]) -> list[int]:
    n = max(len(a), len(b))
    padded = ([*numbers, *([0] * (n - len(numbers)))] for numbers in (a, b))
    return [x + y for x, y in zip(*padded, strict=True)]


@dataclass(slots=True)
class Results:
    """[stream][way] -> one Timing per round; one of the ways is `off`, plain decoding."""

    timings: dict[str, dict[str, list[Timing]]] = field(default_factory=dict)

    def add(self, stream: str, way: str, timing: Timing) -> None:
        self.timings.setdefault(stream, {}).setdefault(way, []).append(timing)

    def speedup(self, stream: str, way: str) -> float:
        """Over plain decoding: every request takes the median of its rounds, so an accident counts once."""
        rows = self.timings[stream]
        return _usual_s(rows[OFF]) / _usual_s(rows[way])

    def speedups(self, stream: str, way: str) -> list[float]:
        """Over plain decoding, by round."""
        rows = self.timings[stream]
        return [a.tps / b.tps for a, b in zip(rows[way], rows[OFF], strict=True)]

    def ways(self) -> list[str]:
        return list(next(iter(self.timings.values())))

    def worst(self, way: str) -> float:
        """The lowest speedup of any stream."""
        return min(self.speedup(stream, way) for stream in self.timings)

    def total(self, stream: str, way: str) -> Timing:
        """Of all rounds."""
        whole = Timing()
        for timing in self.timings[stream][way]:
            whole.add(timing)
        return whole


def _usual_s(rounds: list[Timing]) -> float:
    """Seconds per token of all requests, each the median of its rounds."""
    requests = zip(*(timing.requests for timing in rounds), strict=True)
    return sum(float(median(times)) for times in requests)


class Way:
    """One own server, and requests to it, one at a time; a context manager."""

    def __init__(self, model: Path, flags: str, interrupt: Interrupt, *, clock: str = "wall") -> None:
        """`flags`: of `pyspac run`, for how it drafts and where. Raises PyspacError."""
        options = Given(model=model).way(flags, is_own=True).options
        self.interrupt, self.clock = interrupt, clock
        self.own = OwnServer(options, interrupt)

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.own.close()

    def tokenize(self, text: str) -> list[int]:
        found = self.own.client.post("/tokenize", {"content": text, "add_special": True})["tokens"]
        return [int(token) for token in found]

    def ask(self, prompt: Sequence[int], n_predict: int, **fields: Any) -> tuple[Answer, Timing]:
        """One request, whose prompt is computed anew. Raises KeyboardInterrupt or PyspacError."""
        before, cpu_s = self._n_records(), 0.0

        def on_first() -> None:
            nonlocal cpu_s
            cpu_s = self._cpu_s()

        body = {
            "prompt": list(prompt),
            "n_predict": n_predict,
            "cache_prompt": False,
            "temperature": 0,
            **fields,
        }
        answer = complete(self.own.client, "", lambda text: None, self.interrupt, body | fields, on_first)
        if self.interrupt:
            raise KeyboardInterrupt
        if answer.n_tokens < 2:
            raise PyspacError("the model ends its text at once: nothing can be timed; give another model")
        seconds = self._cpu_s() - cpu_s if self.clock == "cpu" else answer.timings["predicted_ms"] / 1e3
        return answer, self._timing(answer, seconds, before)

    def _timing(self, answer: Answer, seconds: float, before: int) -> Timing:
        totals, n_tokens = answer.totals, answer.n_tokens - 1  # the first token is the prompt's
        timing = Timing(
            n_tokens, seconds, totals.n_steps, totals.n_draft, totals.n_accepted,
            totals.draft_us + totals.process_us, [seconds / n_tokens],
        )  # fmt: skip
        for step in self._steps_since(before):
            timing.drafted_at = _sums(timing.drafted_at, [1] * step.n_draft)
            timing.held_at = _sums(timing.held_at, [1] * step.n_accepted)
        return timing

    def _n_records(self) -> int:
        return 0 if self.own.board is None else int(self.own.board.n_records[0])

    def _steps_since(self, first: int) -> list[StepRecord]:
        """Those that the ring still has."""
        board, end = self.own.board, self._n_records()
        if board is None:
            return []
        found = range(max(first, end - len(board.records)), end)
        return [StepRecord.from_row(board.records[i % len(board.records)]) for i in found]

    def _cpu_s(self) -> float:
        """CPU time of the server's process so far."""
        files = Path(f"/proc/{self.own.server.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9
