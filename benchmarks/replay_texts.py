"""Draft-length controllers on what n-gram drafts really do in real texts; costs of steps are simulated.

In: the demo model, which continues the prompts of bench_speculation.py once, greedily. Out: the controller's
speed over the best fixed length, for two cost curves, with and without a price for changing widths.

    python benchmarks/replay_texts.py
    python benchmarks/replay_texts.py --requests 8 --predict 256 --prompts DIR

What simulated acceptances (replay_speculation.py) do not have, texts do: matches come in runs, hold for a
dozen tokens, and are missing for fifty. Seeded, so two runs print the same.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final

from bench_speculation import STREAMS, prompts
from replay_speculation import FIXED_LENGTHS, N_DRAFT_MAX, SWITCH_US, WANTED_MIX, static_length
from rich.console import Console
from rich.progress import track

from pyspac.engine.step import StepRecord
from pyspac.generate.drafting import Drafter, NgramDrafter
from pyspac.generate.options import RunOptions
from pyspac.generate.session import Session
from pyspac.generate.shadow import ShadowDrafter
from pyspac.speculation.manager import MakeController, Speculation, parse_controller

Text = tuple[list[int], list[int]]  # prompt, continuation
# us of a step of 1 .. 9 tokens: the demo pair on one thread, where wide passes are dear, and on two
COSTS: Final = {
    "one thread": (1050, 1350, 2000, 2450, 2800, 3300, 3600, 3950, 4260),
    "two threads": (770, 980, 1200, 1400, 1600, 1800, 2000, 2150, 2300),
}
NOISE: Final = 0.08


def continued(folder: Path | None, n_requests: int, n_predict: int) -> dict[str, list[Text]]:
    """The demo model's own continuations, by stream."""
    from pyspac.commands.demo import TARGET
    from pyspac.generate.decode import DecodeLoop
    from pyspac.generate.sampling import Sampler, SamplingParams

    session = Session(RunOptions(model=TARGET, stock=True))
    texts: dict[str, list[Text]] = {}
    for stream, given in track(prompts(folder, n_requests).items(), "texts", console=Console(stderr=True)):
        texts[stream] = []
        for prompt in (session.tokenize(text)[:200] for text in given):
            session.context.rollback(0)
            loop = DecodeLoop(session.context, Sampler(SamplingParams()))
            texts[stream].append((prompt, loop.run(prompt, n_predict).token_ids))
    return texts


def request_us(
    speculation: Speculation, text: Text, costs: Sequence[int], switch_us: float, seed: int
) -> float:
    """Time to emit the continuation."""
    rng = random.Random(seed)
    prompt, continuation = text
    tokens = prompt + continuation
    controller = speculation.begin()
    drafter: Drafter = NgramDrafter()
    if controller.wants_shadow:
        drafter = ShadowDrafter(drafter, N_DRAFT_MAX, controller.observe_shadow)
    n_known, width, total_us, step = len(prompt) + 1, 1, 0.0, 0
    while n_known < len(tokens):
        limit = min(controller.next_n_draft(), len(tokens) - n_known - 1)
        drafted = drafter.draft(tokens[:n_known], limit).tokens
        n_held = _n_held(drafted, tokens[n_known:])
        us = costs[len(drafted)] * math.exp(rng.gauss(0.0, NOISE)) + switch_us * (width != 1 + len(drafted))
        width = 1 + len(drafted)
        drafter.accept(n_held)
        controller.observe(
            StepRecord(
                step=step,
                n_draft=len(drafted),
                n_accepted=n_held,
                n_tokens=width,
                draft_us=0,
                verify_us=int(us),
                sample_us=0,
                process_us=0,
            )
        )
        n_known += n_held + 1
        total_us += us
        step += 1
    return total_us


def _n_held(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    return next((i for i, token in enumerate(drafted) if token != tokens[i]), len(drafted))


def stream_us(
    make: MakeController, texts: list[Text], costs: Sequence[int], switch_us: float, seed: int
) -> float:
    """A stream of requests through one `Speculation` that starts with nothing known."""
    speculation = Speculation(make, n_draft_max=N_DRAFT_MAX)
    return sum(
        request_us(speculation, text, costs, switch_us, 1000 * seed + i) for i, text in enumerate(texts)
    )


def over_fixed(
    make: MakeController, texts: list[Text], costs: Sequence[int], switch_us: float, seeds: int
) -> float:
    """Speed over the best fixed length's."""

    def mean_us(one: MakeController) -> float:
        return fmean(stream_us(one, texts, costs, switch_us, seed) for seed in range(seeds))

    return min(mean_us(static_length(k)) for k in FIXED_LENGTHS) / mean_us(make)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controller", default="forecast")
    parser.add_argument("--requests", type=int, default=4, help="per stream")
    parser.add_argument("--predict", type=int, default=128, help="tokens per request")
    parser.add_argument("--prompts", type=Path, metavar="DIR", help="human_eval.jsonl and spec_bench.jsonl")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    texts = continued(args.prompts, args.requests, args.predict)
    make = parse_controller(args.controller)
    print(f"{'costs':12} {'a change of widths':>18}  " + "  ".join(f"{stream:>5}" for stream in STREAMS))
    mixes = []
    for (name, costs), switch_us in product(COSTS.items(), (0.0, SWITCH_US)):
        found = {stream: over_fixed(make, texts[stream], costs, switch_us, args.seeds) for stream in STREAMS}
        mixes.append(found["mix"])
        print(f"{name:12} {switch_us:15.0f} us  " + "  ".join(f"{ratio:5.3f}" for ratio in found.values()))
    print(f"speed over the best fixed length; mix {fmean(mixes):.3f} in the mean (wanted: {WANTED_MIX})")


if __name__ == "__main__":
    main()
