"""The balancer's thresholds against the best fixed one, on emulated devices of chosen speeds and links.

A grid of device speeds (a share of the host's), links and capacities. At each point the same text is read
token by token with the balancer's tau and with fixed ones, in turns; device and link are emulated, times are
the machine's own, so it needs two idle cores: the host has one thread, the device has another.

Of several noisy times the least is too low, and so would be the best fixed one's. So there are sittings, each
on models loaded anew (where memory happens to lie makes a model some per cent faster or slower for good), in
two halves: the best fixed tau of one half is compared in the other half's turns, and the other way round.
Out: milliseconds per token (median of the turns), what the balancer's tau loses against the best fixed one so
chosen (median of the turns' ratios) with its 95 % confidence interval (bootstrap over sittings and their
turns), and `at most`: against the one that came out best in all turns, its luck included.

    python benchmarks/bench_balancer.py                                      # three minutes
    python benchmarks/bench_balancer.py --speeds 0.1,0.3,1 --links 0.02,1 --caches 17%,40%,80% --tokens 640
    python benchmarks/bench_balancer.py --model MODEL.gguf                   # of another size
    python benchmarks/bench_balancer.py --json -
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import deque
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, Final

from machine import describe, one_line

from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.forward.runner import Runner
from pyspac.scheduler.config import SchedulerConfig

ROOT: Final = Path(__file__).resolve().parent.parent
MODEL: Final = ROOT / "pyspac" / "models" / "demo-moe.gguf"
TEXT: Final = ROOT / "docs" / "architecture.md"
N_PROMPT: Final = 32
N_WARM_UP: Final = 64  # tokens, for the scheduler to place experts
N_TURN: Final = 16  # tokens of one way, before the next has its turn
N_THREADS: Final = 1  # of the host: the graph's computes for the device meanwhile
N_DRAWS: Final = 1000  # of the bootstrap
WITHOUT: Final = frozenset({"fallback", "whole"})  # what else would decide
AUTO: Final = "auto"
Point = tuple[float, float, str]  # device's speed, link, capacity
Times = dict[str, list[float]]  # microseconds per token of each turn, by tau


def config(tau: str, estimator: str) -> SchedulerConfig:
    threshold: Any = tau if tau == AUTO else int(tau)
    return SchedulerConfig(estimator=estimator, threshold=threshold, without=WITHOUT, n_draft_max=0)


def fixed_taus(estimator: str) -> list[str]:
    """The lowest, the highest and some between."""
    k = config(AUTO, estimator).effective_levels
    return [str(tau) for tau in sorted({max(1, round(share * k)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)})]


class Way:
    """A model whose experts are placed by one threshold, somewhere in the text."""

    def __init__(self, stack: ExitStack, model: Path, point: Point, tau: str, estimator: str) -> None:
        speed, link, cache = point
        options = ForwardOptions(
            model=model, device=f"emulated:{speed}", copy_gb_s=link, cache=CacheSize(text=cache),
            n_threads=N_THREADS, scheduler=config(tau, estimator),
        )  # fmt: skip
        self.runner = stack.enter_context(Runner(options))
        self.us: list[float] = []

    def begin(self, tokens: list[int]) -> None:
        self.runner.context.decode(tokens, 1)
        self.runner.after_prompt()

    def read(self, tokens: list[int], *, is_timed: bool = True) -> None:
        """Time the passes, not the scheduler, which is another process in a server."""
        us = 0.0
        for token in tokens:
            start = time.perf_counter_ns()
            self.runner.context.decode([token], 1)
            us += (time.perf_counter_ns() - start) / 1e3
            self.runner.after_step(1)
        if is_timed:
            self.us.append(us / len(tokens))

    @property
    def tau(self) -> list[int]:
        assert self.runner.split is not None
        return [int(tau) for tau in self.runner.split.engine.board.tau]

    def costs(self) -> dict[str, Any]:
        assert self.runner.split is not None
        assert self.runner.split.scheduler is not None
        return self.runner.split.scheduler.cost.to_dict()


def sit(model: Path, point: Point, n_tokens: int, estimator: str) -> tuple[Times, dict[str, Any]]:
    """Load a model for each way; the ways take turns, so that all meet the same machine."""
    with ExitStack() as stack:
        taus = [AUTO, *fixed_taus(estimator)]
        ways = {tau: Way(stack, model, point, tau, estimator) for tau in taus}
        auto = ways[AUTO]
        vocab = auto.runner.model.vocab
        text = vocab.tokenize(TEXT.read_text(encoding="utf-8"))[: N_PROMPT + N_WARM_UP + n_tokens]
        for way in ways.values():
            way.begin(text[:N_PROMPT])
            way.read(text[N_PROMPT : N_PROMPT + N_WARM_UP], is_timed=False)
        order = deque(ways.values())
        for start in range(N_PROMPT + N_WARM_UP, len(text), N_TURN):
            for way in order:
                way.read(text[start : start + N_TURN])
            order.rotate()
        return {tau: way.us for tau, way in ways.items()}, {"tau": auto.tau, **auto.costs()}


def joined(sittings: list[Times]) -> Times:
    return {tau: [us for times in sittings for us in times[tau]] for tau in sittings[0]}


def best_of(sittings: list[Times]) -> str:
    """The fixed tau with the least median."""
    times = joined(sittings)
    return min((tau for tau in times if tau != AUTO), key=lambda tau: median(times[tau]))


def ratios(times: Times, tau: str) -> list[float]:
    return [a / b for a, b in zip(times[AUTO], times[tau], strict=True)]


def compare(sittings: list[Times]) -> dict[str, Any]:
    """See the program's docstring."""
    half = len(sittings) // 2
    chosen = [best_of(sittings[half:])] * half + [best_of(sittings[:half])] * (len(sittings) - half)
    turns = [ratios(times, tau) for times, tau in zip(sittings, chosen, strict=True)]
    draw = random.Random(1)
    draws = [
        median(x for found in draw.choices(turns, k=len(turns)) for x in draw.choices(found, k=len(found)))
        for _ in range(N_DRAWS)
    ]
    cuts = quantiles(draws, n=40)
    best = best_of(sittings)
    return {
        "ms": {tau: median(us) / 1e3 for tau, us in joined(sittings).items()},
        "best": sorted({chosen[0], chosen[-1]}, key=int),
        "loss": median(x for found in turns for x in found) - 1.0,
        "loss_95": [cuts[0] - 1.0, cuts[-1] - 1.0],
        "loss_at_most": median(ratios(joined(sittings), best)) - 1.0,
    }


def measure(model: Path, point: Point, args: argparse.Namespace) -> dict[str, Any]:
    """One point of the grid."""
    speed, link, cache = point
    sat = [sit(model, point, args.tokens, args.estimator) for _ in range(args.sittings)]
    return {"model": model.name, "speed": speed, "link_gb_s": link, "cache": cache,
            "estimator": args.estimator, "sittings": args.sittings, **compare([times for times, _ in sat]),
            **sat[-1][1]}  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    ms = ", ".join(f"{tau} {value:.3f}" for tau, value in row["ms"].items())
    device = row["device_expert_us"][0]
    low, high = row["loss_95"]
    print(
        f"{row['speed']:5g} {row['link_gb_s']:6g} {row['cache']:>5}  {row['loss']:+6.1%} "
        f"({low:+.1%} to {high:+.1%}; at most {row['loss_at_most']:+.1%})  tau {row['tau']}, "
        f"host {row['host_expert_us'][0] or 0:.0f} us, device {device or 0:.0f} us; ms: {ms}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--speeds", default="0.3,1")
    parser.add_argument("--links", default="0.02,1", help="1e9 bytes/s; 0: as fast as memory")
    parser.add_argument("--caches", default="17%,40%")
    parser.add_argument("--tokens", type=int, default=320, help="of each way, at each point and sitting")
    parser.add_argument("--sittings", type=int, default=4, help="on models loaded anew; in two halves")
    parser.add_argument("--estimator", default=SchedulerConfig().estimator)
    parser.add_argument("--json", metavar="FILE", help="rows, one object per line; -: to stdout, no table")
    args = parser.parse_args()
    if args.tokens <= N_TURN:
        parser.error(f"--tokens cannot be {args.tokens}: give more than {N_TURN}, of one turn")
    if args.sittings < 2:
        parser.error(f"--sittings cannot be {args.sittings}: give 2 or more, one for each half")
    if args.json not in (None, "-") and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"--json cannot be {args.json}: give a file in a folder that exists, or -")
    return args


def main() -> None:
    args = parse()
    grid = product(
        map(float, args.speeds.split(",")), map(float, args.links.split(",")), args.caches.split(",")
    )
    is_table = args.json != "-"
    losses = []
    if is_table:
        print(f"device and link are emulated; {one_line(describe())}")
        print("speed   link cache    loss")
    with ExitStack() as stack:
        out = stack.enter_context(Path(args.json).open("w")) if is_table and args.json else sys.stdout
        for point in grid:
            row = measure(args.model, point, args)
            losses.append(row["loss"])
            if is_table:
                print_row(row)
            if args.json:
                print(json.dumps(row | {"machine": describe()}), file=out, flush=True)
    if is_table:
        print(f"mean loss {mean(losses):+.1%}, worst {max(losses):+.1%}")


if __name__ == "__main__":
    main()
