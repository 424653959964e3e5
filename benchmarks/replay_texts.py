"""Draft-length controllers on what drafts really do in real texts; costs of steps are simulated.

In: the demo pair; its target continues the prompts of bench_speculation.py once, greedily, and its draft
model drafts at every token of that. Out: the controller's speed over the best fixed length and over plain
decoding, by drafter, for two cost curves, with and without a price for changing widths.

    python benchmarks/replay_texts.py
    python benchmarks/replay_texts.py --requests 8 --predict 256 --prompts DIR --drafters draft

What simulated acceptances (replay_speculation.py) do not have, texts do: matches come in runs, hold for a
dozen tokens, and are missing for fifty. Seeded, so two runs print the same.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final

from bench_speculation import STREAMS, prompts
from replay_speculation import FIXED_LENGTHS, N_DRAFT_MAX, SWITCH_US, WANTED, WANTED_MIX, static_length
from rich.console import Console
from rich.progress import track

from pyspac.engine.step import StepRecord
from pyspac.generate.drafting import Drafter, DraftResult, ModelDrafter
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.generate.options import RunOptions
from pyspac.generate.speculation_hook import forecast_for, steered
from pyspac.speculation.manager import MakeController, Speculation, parse_controller

# us of a step of 1 .. 9 tokens: the demo pair on one thread, where wide passes are dear, and on two
COSTS: Final = {
    "ngram": {
        "one thread": (1050, 1350, 2000, 2450, 2800, 3300, 3600, 3950, 4260),
        "two threads": (770, 980, 1200, 1400, 1600, 1800, 2000, 2150, 2300),
    },
    "draft": {
        "one thread": (1050, 1350, 2000, 2450, 2800, 3300, 3600, 3950, 4260),
        "two threads": (510, 700, 950, 1170, 1400, 1600, 1850, 2100, 2400),
    },
}
DRAFT_US: Final = 155.0  # of the demo's draft model
BACKLOG_US: Final = (300.0, 45.0)  # its first draft after a pause: more, and per token that it has missed
SWITCHES_US: Final = (0.0, SWITCH_US, 500.0)  # 500: the demo's graphs, as much as a step
NOISE: Final = 0.08


@dataclass(frozen=True, slots=True)
class Text:
    """One request."""

    prompt: list[int]
    continuation: list[int]
    drafts: list[list[int]]  # the draft model's, before each token of the continuation but the first


def continued(folder: Path | None, n_requests: int, n_predict: int) -> dict[str, list[Text]]:
    """The demo model's own continuations, by stream."""
    from pyspac.commands.demo import DRAFT, TARGET
    from pyspac.generate.decode import DecodeLoop
    from pyspac.generate.sampling import Sampler, SamplingParams
    from pyspac.generate.session import Session

    session = Session(RunOptions(model=TARGET, draft=DRAFT, spec_type="draft", stock=True))
    assert isinstance(session.drafter, ModelDrafter)
    texts: dict[str, list[Text]] = {}
    for stream, given in track(prompts(folder, n_requests).items(), "texts", console=Console(stderr=True)):
        texts[stream] = []
        for prompt in (session.tokenize(text)[:200] for text in given):
            session.context.rollback(0)
            loop = DecodeLoop(session.context, Sampler(SamplingParams()))
            continuation = loop.run(prompt, n_predict).token_ids
            texts[stream].append(Text(prompt, continuation, _drafts(session.drafter, prompt, continuation)))
    return texts


def _drafts(drafter: ModelDrafter, prompt: list[int], continuation: list[int]) -> list[list[int]]:
    drafter.keep(0)
    drafter.prepare(prompt)
    drafts = []
    for n_known in range(1, len(continuation)):
        drafts.append(drafter.draft(prompt + continuation[:n_known], N_DRAFT_MAX).tokens)
        drafter.accept(0)
    return drafts


class ReplayedDrafter(Drafter):
    """Says what the draft model said."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        return DraftResult(self.text.drafts[len(tokens) - len(self.text.prompt) - 1][:n_max])


class Clock:
    """What steps take."""

    def __init__(self, drafter: str, costs: Sequence[int], switch_us: float, seed: int) -> None:
        self.costs, self.switch_us = costs, switch_us
        self.draft_us = DRAFT_US if drafter == "draft" else 0.0
        self.rng = random.Random(seed)
        self.width = 1
        self.n_missed = 0  # plain steps since the last draft

    def step_us(self, n_draft: int) -> tuple[float, float]:
        """(drafting, verifying)."""
        draft_us = n_draft * self.draft_us
        if draft_us and self.n_missed:
            draft_us += BACKLOG_US[0] + BACKLOG_US[1] * self.n_missed
        self.n_missed = 0 if n_draft else self.n_missed + 1
        us = self.costs[n_draft] * math.exp(self.rng.gauss(0.0, NOISE))
        us += self.switch_us * (self.width != 1 + n_draft)
        self.width = 1 + n_draft
        return draft_us, us


def request_us(speculation: Speculation, text: Text, drafter_name: str, clock: Clock) -> float:
    """Time to emit the continuation."""
    tokens = text.prompt + text.continuation
    controller = speculation.begin()
    drafter: Drafter = NgramDrafter() if drafter_name == "ngram" else ReplayedDrafter(text)
    drafter = steered(drafter, controller)
    drafter.prepare(text.prompt)
    total_us, step = 0.0, 0
    known = tokens[: len(text.prompt) + 1]
    while (n_known := len(known)) < len(tokens):
        limit = min(controller.next_n_draft(), len(tokens) - n_known - 1)
        draft = drafter.draft(known, limit)
        drafted = draft.tokens
        n_held = _n_held(drafted, tokens[n_known:])
        known += tokens[n_known : n_known + n_held + 1]
        draft_us, verify_us = clock.step_us(len(drafted))
        drafter.accept(n_held)
        controller.observe(
            StepRecord(
                step=step,
                n_draft=len(drafted),
                n_accepted=n_held,
                n_tokens=1 + len(drafted),
                n_matched=draft.n_matched,
                draft_us=draft_us,
                verify_us=verify_us,
            )
        )
        total_us += draft_us + verify_us
        step += 1
    return total_us


def _n_held(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    return next((i for i, token in enumerate(drafted) if token != tokens[i]), len(drafted))


@dataclass(frozen=True, slots=True)
class Setting:
    """What one row of the table is about."""

    drafter: str
    costs: str
    switch_us: float

    def stream_us(self, make: MakeController, texts: list[Text], seed: int) -> float:
        """A stream of requests through one `Speculation` that starts with nothing known."""
        speculation = Speculation(make, n_draft_max=N_DRAFT_MAX, forecast=forecast_for(self.drafter))
        costs = COSTS[self.drafter][self.costs]
        clocks = (Clock(self.drafter, costs, self.switch_us, 1000 * seed + i) for i in range(len(texts)))
        return sum(
            request_us(speculation, text, self.drafter, clock)
            for text, clock in zip(texts, clocks, strict=True)
        )

    def compare(self, make: MakeController, texts: list[Text], seeds: int) -> tuple[float, float]:
        """Speed over the best fixed length's, and over never drafting."""

        def mean_us(one: MakeController) -> float:
            return fmean(self.stream_us(one, texts, seed) for seed in range(seeds))

        fixed = {k: mean_us(static_length(k)) for k in FIXED_LENGTHS}
        us = mean_us(make)
        return min(fixed.values()) / us, fixed[0] / us


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controller", default="forecast")
    parser.add_argument("--drafters", default="ngram,draft", help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=4, help="per stream")
    parser.add_argument("--predict", type=int, default=128, help="tokens per request")
    parser.add_argument("--prompts", type=Path, metavar="DIR", help="human_eval.jsonl and spec_bench.jsonl")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    texts = continued(args.prompts, args.requests, args.predict)
    make = parse_controller(args.controller)
    print(f"{'drafter':7} {'costs':11} {'new width':>9}  " + "  ".join(f"{stream:>13}" for stream in STREAMS))
    for drafter in args.drafters.split(","):
        mixes, worst = [], 1.0
        for costs, switch_us in product(COSTS[drafter], SWITCHES_US):
            setting = Setting(drafter, costs, switch_us)
            found = {stream: setting.compare(make, texts[stream], args.seeds) for stream in STREAMS}
            mixes.append(found["mix"][0])
            worst = min(worst, *(plain for _, plain in found.values()))
            cells = "  ".join(f"{best:5.3f} ({plain:5.3f})" for best, plain in found.values())
            print(f"{drafter:7} {costs:11} {switch_us:6.0f} us  {cells}")
        print(
            f"{drafter}: mix {fmean(mixes):.3f} of the best fixed length in the mean (wanted: {WANTED_MIX}), "
            f"worst loss {1.0 - worst:.1%} (wanted: {WANTED[drafter]:.0%} at most)"
        )
    print("speed over the best fixed length (over plain decoding)")


if __name__ == "__main__":
    main()
