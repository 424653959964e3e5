"""Is speculation ever slower than none? Draft-length controllers against fixed lengths, interleaved.

In: the demo pair, and a synthetic larger model whose verification is expensive. Out: a table of speedups over
plain decoding by stream and controller, medians with the lowest and highest round, and a figure. `static-0`
is plain decoding once more: how far it lies from 1 is how much these numbers are worth.

    python benchmarks/bench_speculation.py demo --drafter ngram
    python benchmarks/bench_speculation.py demo --drafter draft --prompts DIR
    python benchmarks/bench_speculation.py synthetic --model synthetic.gguf

Without a model, on simulated curves: benchmarks/replay_speculation.py.

Every request of a stream is run by every controller before the next one, in another order each round, so all
meet the same disturbances. A controller starts each stream knowing nothing, as in the first seconds of a
process; with --keep it keeps what it learned in the rounds before, as in a server that runs for longer (the
first round is run once more then, unmeasured). `demo`: the model's own text, greedy. `synthetic`: the model
(scripts/make_synthetic_gguf.py) goes on with token t + 1, so drafts can be made to hold by chance, with given
acceptances; verification is real.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import machine
from replay_speculation import CURVES, WANTED, WANTED_MIX
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pyspac.generate.drafting import Drafter, FreeDrafter, ModelDrafter
from pyspac.generate.metrics import Metrics
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.speculation_hook import SpeculationHook, forecast_for
from pyspac.speculation.forecast import Forecast
from pyspac.speculation.manager import Speculation
from pyspac.speculation.static import Static

OFF = "off"
CONTROLLERS = (OFF, "static-1", "static-3", "static-8", "cascade", "per-k-ema", "forecast")
STREAMS = ("code", "prose", "lists", "mix")
MIX = ("code", "prose", "lists", "prose")
N_SCRIPTED = 8  # tokens that a scripted drafter prepares


@dataclass(slots=True)
class Timing:
    """What one controller did in one stream of one round."""

    n_tokens: int = 0
    seconds: float = 0.0
    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    draft_us: float = 0.0  # drafting, and reading afterwards what was verified
    requests: list[float] = field(default_factory=list)  # seconds per token

    @property
    def tps(self) -> float:
        return self.n_tokens / self.seconds


@dataclass(slots=True)
class Results:
    """[stream][controller] -> one Timing per round."""

    drafter: str
    timings: dict[str, dict[str, list[Timing]]] = field(default_factory=dict)

    def add(self, stream: str, controller: str, timing: Timing) -> None:
        self.timings.setdefault(stream, {}).setdefault(controller, []).append(timing)

    def speedup(self, stream: str, controller: str) -> float:
        """Over plain decoding: every request takes the median of its rounds, so an accident counts once."""
        rows = self.timings[stream]
        return _usual_s(rows[OFF]) / _usual_s(rows[controller])

    def speedups(self, stream: str, controller: str) -> list[float]:
        """Over plain decoding, by round."""
        rows = self.timings[stream]
        return [a.tps / b.tps for a, b in zip(rows[controller], rows[OFF], strict=True)]

    def controllers(self) -> list[str]:
        return list(next(iter(self.timings.values())))

    def worst(self, controller: str) -> float:
        """The lowest speedup of any stream."""
        return min(self.speedup(stream, controller) for stream in self.timings)


def _usual_s(rounds: list[Timing]) -> float:
    """Seconds per token of all requests, each the median of its rounds."""
    requests = zip(*(timing.requests for timing in rounds), strict=True)
    return sum(float(median(times)) for times in requests)


# --------------------------------------------------------------------------------------------- drafters


class ScriptedDrafter(FreeDrafter):
    """Knows that the model counts: t, t + 1, ...; drafts hold by chance, the same for everyone at a position.

    Free, as an n-gram drafter is, so that controllers may watch it in the shadow.
    """

    def __init__(self, kind: str, seed: int, n_vocab: int) -> None:
        self.acceptance, self.hit_rate = CURVES[kind]
        self.seed, self.n_vocab = seed, n_vocab

    def draft_at(self, tokens: Sequence[int], end: int, n_max: int) -> list[int]:
        acceptance = self.acceptance
        rng = random.Random(self.seed * 1_000_003 + end)
        if rng.random() >= self.hit_rate:
            return []
        n_held, n = 0, max(n_max, N_SCRIPTED)  # the same work whatever is asked for
        while rng.random() < acceptance[min(n_held, len(acceptance) - 1)] and n_held < n:
            n_held += 1
        right = [self._wrapped(tokens[end - 1] + 1 + i) for i in range(n)]
        drafted = [t if i < n_held else self._wrapped(t + 7) for i, t in enumerate(right)]
        return drafted[:n_max]

    def _wrapped(self, token: int) -> int:
        """The lowest ids are control tokens."""
        return token if token < self.n_vocab else token - self.n_vocab + 16


# ----------------------------------------------------------------------------------------------- models


def use_cpu_clock() -> None:
    """Let the decode loop and the controllers see the time of this thread only, without what others do."""
    import pyspac.generate.decode
    import pyspac.generate.speculation_hook

    clock = SimpleNamespace(perf_counter=time.thread_time, perf_counter_ns=time.thread_time_ns)
    pyspac.generate.decode.time = pyspac.generate.speculation_hook.time = clock  # type: ignore[attr-defined,assignment]


class ModelBench:
    """One loaded session; every request starts with empty caches."""

    def __init__(self, options: RunOptions, drafter: str, args: argparse.Namespace) -> None:
        from pyspac.generate.session import Session

        self.session = Session(options)
        self.drafter, self.n_predict, self.n_draft_max = drafter, args.predict, args.draft_max

    def run(
        self,
        controller: str,
        speculation: Speculation,
        prompt: list[int],
        timing: Timing,
        drafter: Drafter | None = None,
    ) -> None:
        """One request."""
        from pyspac.generate.decode import DecodeLoop
        from pyspac.generate.sampling import Sampler, SamplingParams

        session, split = self.session, self.session.split
        session.context.rollback(0)
        drafter = drafter or self._new_drafter()
        hook: Any = split
        n_draft_max = 0 if controller == OFF else _fixed_length(controller)
        if n_draft_max is None:
            hook = SpeculationHook(speculation, drafter, split)
            drafter, n_draft_max = hook.drafter, self.n_draft_max
        loop = DecodeLoop(
            session.context, Sampler(SamplingParams()), drafter, n_draft_max=n_draft_max, hook=hook
        )
        count_request(loop.run(prompt, self.n_predict).metrics, timing)

    def _new_drafter(self) -> Drafter:
        if self.drafter == "ngram":
            return NgramDrafter()
        from pyspac.generate.sampling import Sampler, SamplingParams

        assert isinstance(self.session.drafter, ModelDrafter)
        self.session.drafter.context.rollback(0)
        return ModelDrafter(self.session.drafter.context, Sampler(SamplingParams()))


def _fixed_length(controller: str) -> int | None:
    return int(controller.removeprefix("static-")) if controller.startswith("static-") else None


def count_request(metrics: Metrics, timing: Timing) -> None:
    """Add one request; the first token is the prompt's."""
    n_tokens, seconds = metrics.n_tokens - 1, metrics.last_token_s - metrics.first_token_s
    timing.n_tokens += n_tokens
    timing.seconds += seconds
    timing.requests.append(seconds / max(1, n_tokens))
    totals = metrics.totals
    timing.n_steps += totals.n_steps
    timing.n_drafted += totals.n_draft
    timing.n_accepted += totals.n_accepted
    timing.draft_us += totals.draft_us + totals.process_us


def _speculation(controller: str, args: argparse.Namespace) -> Speculation:
    forecast = forecast_for(args.drafter) if args.what == "demo" else Forecast
    return Speculation(_maker(controller), n_draft_max=args.draft_max, forecast=forecast)


def interleave(
    results: Results,
    stream: str,
    requests: Callable[[int], list[Any]],
    run: Callable[[str, Speculation, Any, Timing], None],
    args: argparse.Namespace,
) -> None:
    """All controllers in turn for each request, in a new order every round."""
    rng, names = random.Random(0), args.controllers
    console = Console(file=sys.stderr)
    rounds = [*([0] if args.keep else []), *range(args.rounds)]
    for n, i in enumerate(track(rounds, description=stream, console=console, transient=True)):
        if n == 0 or not args.keep:
            speculations = {name: _speculation(name, args) for name in names}
        timings = {name: Timing() for name in names}
        for request in requests(i):
            for name in rng.sample(names, len(names)):
                run(name, speculations[name], request, timings[name])
        if n < len(rounds) - args.rounds:
            continue  # the unmeasured one
        for name in names:
            results.add(stream, name, timings[name])


def _maker(controller: str) -> Any:
    length = _fixed_length(controller)
    return controller if length is None else lambda shared: Static(shared, length)


# -------------------------------------------------------------------------------------------- the two runs


def run_demo(args: argparse.Namespace) -> Results:
    from pyspac.commands.demo import DRAFT, TARGET

    options = RunOptions(
        model=args.model or TARGET,
        draft=(args.model_draft or DRAFT) if args.drafter == "draft" else None,
        spec_type=args.drafter,
        draft_max=args.draft_max,
        **_placement(args),
    )
    bench = ModelBench(options, args.drafter, args)
    results = Results(args.drafter)
    texts = prompts(args.prompts, args.requests)

    def run(name: str, speculation: Speculation, text: str, timing: Timing) -> None:
        tokens = bench.session.tokenize(text)[: args.prompt_tokens]
        bench.run(name, speculation, tokens, timing)

    run(OFF, Speculation(OFF, n_draft_max=0), texts["code"][0], Timing())  # warm-up
    for stream in STREAMS:
        requests = texts[stream]
        interleave(results, stream, lambda i, r=requests: r, run, args)
    return results


def run_synthetic(args: argparse.Namespace) -> Results:
    options = RunOptions(model=args.model, spec_type="ngram", draft_max=args.draft_max, **_placement(args))
    bench = ModelBench(options, "ngram", args)
    n_vocab = bench.session.model.vocab.n_tokens
    results = Results("ngram")
    prompt = list(range(100, 100 + args.prompt_tokens))

    def run(name: str, speculation: Speculation, request: tuple[str, int], timing: Timing) -> None:
        kind, seed = request
        drafter = ScriptedDrafter(kind, seed, n_vocab)
        bench.run(name, speculation, [t + 37 * seed for t in prompt], timing, drafter)

    run(OFF, Speculation(OFF, n_draft_max=0), ("code", 0), Timing())
    for stream in STREAMS:
        kinds = _kinds(stream, args.requests)
        requests = [(kind, i) for i, kind in enumerate(kinds)]
        interleave(results, stream, lambda i, r=requests: r, run, args)
    return results


def _kinds(stream: str, n: int) -> list[str]:
    """The kind of text of each of `n` requests."""
    return [MIX[i % len(MIX)] if stream == "mix" else stream for i in range(n)]


def _placement(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "stock": args.stock,
        "device": args.device,
        "cache": CacheSize(text=args.cache),
        "n_threads": args.threads,
    }


# ---------------------------------------------------------------------------------------------- prompts


def prompts(folder: Path | None, n_requests: int) -> dict[str, list[str]]:
    """Texts by stream: our own, and from `folder` for every second one if it is given."""
    own = {"code": list(_code()), "prose": list(_prose()), "lists": list(_lists())}
    if folder is not None:
        other = {"code": _turns(folder / "human_eval.jsonl"), "prose": _turns(folder / "spec_bench.jsonl")}
        for kind, texts in other.items():
            own[kind] = [text for pair in zip(own[kind], texts, strict=False) for text in pair]
    streams = {kind: [texts[i % len(texts)] for i in range(n_requests)] for kind, texts in own.items()}
    streams["mix"] = [streams[MIX[i % len(MIX)]][i] for i in range(n_requests)]
    return streams


def _code() -> Iterator[str]:
    import ast
    import asyncio.queues
    import inspect
    import textwrap
    import zipfile

    for module in (textwrap, zipfile, asyncio.queues, ast):
        yield inspect.getsource(module)[2000:5000]


def _prose() -> Iterator[str]:
    import decimal
    import doctest
    import logging
    import pickle

    for module in (doctest, decimal, pickle, logging):
        yield (module.__doc__ or "") + "\n\nThe rest of this module"


def _lists() -> Iterator[str]:
    yield "COLORS = {\n" + "".join(f'    "color_{i}": ({i}, {2 * i}, {3 * i}),\n' for i in range(12))
    yield "def test_all(self):\n" + "".join(f"        self.assertEqual(f({i}), {i * i})\n" for i in range(14))
    yield "names = [\n" + "".join(f"    'name{i:02}',\n" for i in range(30))
    yield "\n".join(f"from .module_{c} import *" for c in "abcdefghijklmn") + "\n"


def _turns(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["turns"][0] for row in rows]


# ---------------------------------------------------------------------------------------------- reports


def show(results: Results, title: str) -> None:
    """The table, and whether what is wanted was reached."""
    console = Console(width=130)
    table = Table(title=title, title_justify="left")
    for name in ("stream", *results.controllers()):
        table.add_column(name, justify="right" if name != "stream" else "left")
    for stream in results.timings:
        table.add_row(stream, *(_cell(results, stream, name) for name in results.controllers()))
    table.add_row("worst", *(f"{results.worst(name):.3f}" for name in results.controllers()))
    console.print(table)
    console.print(
        "speedup over no speculation (off: tokens/s): requests' medians over rounds (lowest - highest round)"
    )
    for line in verdicts(results):
        console.print(line)


def _cell(results: Results, stream: str, name: str) -> str:
    if name == OFF:
        return f"{median(t.tps for t in results.timings[stream][OFF]):.1f}"
    values = results.speedups(stream, name)
    return f"{results.speedup(stream, name):.2f} ({min(values):.2f}-{max(values):.2f})"


def verdicts(results: Results) -> Iterator[str]:
    """One line per controller."""
    static = [name for name in results.controllers() if name.startswith("static")]
    best = max(results.speedup("mix", name) for name in static)
    allowed = WANTED[results.drafter]
    for name in results.controllers():
        if name == OFF:
            continue
        slowdown = 1 - results.worst(name)
        mix = results.speedup("mix", name) / best
        yield (
            f"{name:10} worst slowdown {max(0.0, slowdown):6.1%} (wanted: at most {allowed:.0%}: "
            f"{'yes' if slowdown <= allowed else 'NO'}); mix over the best fixed length {mix:.3f} "
            f"(wanted: {WANTED_MIX:.2f}: {'yes' if mix >= WANTED_MIX else 'NO'})"
        )


def to_dict(results: Results) -> dict[str, Any]:
    return {
        stream: {
            name: {
                "speedup": results.speedup(stream, name),
                "rounds": results.speedups(stream, name),
                "tps": [t.tps for t in timings],
                "n_drafted": sum(t.n_drafted for t in timings),
                "n_accepted": sum(t.n_accepted for t in timings),
                "n_steps": sum(t.n_steps for t in timings),
            }
            for name, timings in rows.items()
        }
        for stream, rows in results.timings.items()
    }


def draw(results: Results, path: Path, title: str) -> None:
    """Bars by stream with the lowest and highest round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [name for name in results.controllers() if name != OFF]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [results.speedups(stream, name) for stream in results.timings]
        medians = [results.speedup(stream, name) for stream in results.timings]
        errors = [
            [max(0.0, m - min(v)) for m, v in zip(medians, values, strict=True)],
            [max(0.0, max(v) - m) for m, v in zip(medians, values, strict=True)],
        ]
        x = [j + i * width for j in range(len(values))]
        axes.bar(x, medians, width, yerr=errors, capsize=2, label=name)
    axes.set_xticks([j + 0.4 - width / 2 for j in range(len(results.timings))], list(results.timings))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="speedup over no speculation", title=title)
    axes.legend(ncols=len(names))
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("demo", "synthetic"), nargs="?", default="demo")
    parser.add_argument("--drafter", choices=("ngram", "draft"), default="ngram")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--model-draft", type=Path)
    parser.add_argument("--prompts", type=Path, metavar="DIR", help="human_eval.jsonl and spec_bench.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8, help="per stream")
    parser.add_argument("--predict", type=int, default=256, help="tokens per request")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--draft-max", type=int, default=8, help="the controllers' cap")
    parser.add_argument("--controllers", default=",".join(CONTROLLERS), type=lambda text: text.split(","))
    parser.add_argument("--keep", action="store_true", help="what controllers learn, from round to round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", default="50%")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time of the decoding thread alone, for a machine that others use too; with --threads 1",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.what == "synthetic" and args.model is None:
        sys.exit("--model is needed: write one with scripts/make_synthetic_gguf.py")
    if args.clock == "cpu":
        if args.threads != 1:
            sys.exit("--clock cpu needs --threads 1: other threads' time would be missing")
        use_cpu_clock()
    here = machine.describe()
    results = {"demo": run_demo, "synthetic": run_synthetic}[args.what](args)
    title = (
        f"{args.what}, drafter {args.drafter}, {args.requests} x {args.predict} tokens, {args.rounds} rounds"
    )
    title += ", controllers keep what they learned" if args.keep else ""
    title += ", CPU time of the decoding thread" if args.clock == "cpu" else ""
    show(results, title)
    print(machine.one_line(here))
    if args.json:
        row = {"machine": here, "arguments": vars(args), "results": to_dict(results)}
        args.json.write_text(json.dumps(row, indent=1, default=str) + "\n")
    if args.png:
        draw(results, args.png, title)


if __name__ == "__main__":
    main()
