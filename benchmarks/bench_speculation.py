"""Is speculation ever slower than none? Draft-length controllers against fixed lengths, interleaved.

In: the demo pair, or a synthetic larger model whose verification is expensive. Out: a table of speedups over
plain decoding by stream and controller, medians with the lowest and highest round, and a figure. `static-0`
is plain decoding once more: how far it lies from 1 is how much these numbers are worth.

    python benchmarks/bench_speculation.py demo --drafter ngram
    python benchmarks/bench_speculation.py demo --drafter draft --prompts DIR
    python benchmarks/bench_speculation.py synthetic --model synthetic.gguf

Without a model, on simulated curves: benchmarks/replay_speculation.py.

Every controller has a llama-server of its own for each stream, so it begins knowing nothing; every request is
run by every controller before the next one, in another order each round, so all meet the same disturbances.
The first round is not measured, unless `--cold`: then there is only that one, as in the first seconds of a
server. `demo`: the model's own text, greedy. `synthetic`: the model (scripts/make_synthetic_gguf.py) goes on
with token t + 1, as the prompt does, so that `ngram` always drafts; drafts hold by chance, with given
acceptances (llama-server's --spec-synth-rates), and verification is real.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any, Final

import machine
from drafting import OFF, Results, Timing, Way
from replay_speculation import CURVES, WANTED, WANTED_MIX
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pyspac.commands.demo import DRAFT, TARGET
from pyspac.errors import PyspacError
from pyspac.talk.interrupt import Interrupt

CONTROLLERS: Final = (OFF, "static-0", "static-1", "static-3", "static-8", "cascade", "forecast")
STREAMS: Final = ("code", "prose", "lists", "mix")
MIX: Final = ("code", "prose", "lists", "prose")
N_COUNTED: Final = 4  # tokens of the synthetic prompt that stood at its begin: a match

# ---------------------------------------------------------------------------------------------- servers


def flags_of(controller: str, stream: str, args: argparse.Namespace) -> str:
    """Of `pyspac run`, for a server that drafts as `controller` says."""
    flags = ["--device", args.device, *(["--cache", args.cache] if args.device != "none" else [])]
    flags += ["-t", str(args.threads)] if args.threads else []
    if controller in (OFF, "static-0"):
        return shlex.join(flags)
    flags += ["--spec-type", args.drafter]
    flags += ["-md", str(args.model_draft or DRAFT)] if args.drafter == "draft" else []
    length = fixed_length(controller)
    flags += ["--draft-max", str(length or args.draft_max)]
    flags += [] if length else ["--speculation", controller]
    if args.what == "synthetic":
        rates = accumulate(acceptances(stream, length or args.draft_max), mul)
        flags += ["--spec-synth-rates", ",".join(f"{rate:.6f}" for rate in rates)]
    return shlex.join(flags)


def acceptances(kind: str, n: int) -> list[float]:
    """Chances of tokens 1, 2, ... of a draft, if all before it held."""
    curve = CURVES[kind][0]
    return [curve[min(i, len(curve) - 1)] for i in range(n)]


def fixed_length(controller: str) -> int | None:
    return int(controller.removeprefix("static-")) if controller.startswith("static-") else None


def run_stream(results: Results, stream: str, requests: list[Any], args: argparse.Namespace) -> None:
    """All controllers in turn for each request, in a new order every round. A request: text, or tokens."""
    rng, names = random.Random(0), args.controllers
    model = args.model or TARGET
    with Interrupt.watch() as interrupt, ExitStack() as stack:
        ways = {
            name: stack.enter_context(Way(model, flags_of(name, stream, args), interrupt, clock=args.clock))
            for name in names
        }
        rounds = range(1 if args.cold else 1 + args.rounds)
        for i in track(rounds, description=stream, console=Console(file=sys.stderr), transient=True):
            timings = {name: Timing() for name in names}
            for request in requests:
                for name in rng.sample(names, len(names)):
                    prompt = (
                        ways[name].tokenize(request)[: args.prompt_tokens]
                        if isinstance(request, str)
                        else request
                    )
                    _, timing = ways[name].ask(prompt, args.predict, ignore_eos=True)
                    timings[name].add(timing)
            for name in names if i or args.cold else ():
                results.add(stream, name, timings[name])


def run_demo(args: argparse.Namespace) -> Results:
    results, texts = Results(), prompts(args.prompts, args.requests)
    for stream in args.streams:
        run_stream(results, stream, texts[stream], args)
    return results


def run_synthetic(args: argparse.Namespace) -> Results:
    """No `mix`: a server's drafts hold with one set of chances."""
    results = Results()
    for stream in (name for name in args.streams if name != "mix"):
        run_stream(results, stream, [counted(args, i) for i in range(args.requests)], args)
    return results


def counted(args: argparse.Namespace, i: int) -> list[int]:
    """A prompt that counts as far as the answer will, and begins anew: the answer stands in it."""
    numbers = range(100 + 37 * i, 100 + 37 * i + args.predict + 2 * N_COUNTED)
    return [*numbers, *numbers[:N_COUNTED]]


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


def show(results: Results, title: str, drafter: str) -> None:
    """The table, and whether what is wanted was reached."""
    console = Console(width=130)
    table = Table(title=title, title_justify="left")
    for name in ("stream", *results.ways()):
        table.add_column(name, justify="right" if name != "stream" else "left")
    for stream in results.timings:
        table.add_row(stream, *(_cell(results, stream, name) for name in results.ways()))
    table.add_row("worst", *(f"{results.worst(name):.3f}" for name in results.ways()))
    console.print(table)
    console.print(
        "speedup over no speculation (off: tokens/s): requests' medians over rounds (lowest - highest round)"
    )
    for line in verdicts(results, drafter):
        console.print(line)


def _cell(results: Results, stream: str, name: str) -> str:
    if name == OFF:
        return f"{median(t.tps for t in results.timings[stream][OFF]):.1f}"
    values = results.speedups(stream, name)
    return f"{results.speedup(stream, name):.2f} ({min(values):.2f}-{max(values):.2f})"


def verdicts(results: Results, drafter: str) -> Iterator[str]:
    """One line per controller."""
    allowed = WANTED[drafter]
    for name in results.ways():
        if name == OFF:
            continue
        slowdown = 1 - results.worst(name)
        yield (
            f"{name:10} worst slowdown {max(0.0, slowdown):6.1%} (wanted: at most {allowed:.0%}: "
            f"{'yes' if slowdown <= allowed else 'NO'}){_mix_verdict(results, name)}"
        )


def _mix_verdict(results: Results, name: str) -> str:
    static = [way for way in results.ways() if fixed_length(way) is not None]
    if "mix" not in results.timings or not static:
        return ""
    mix = results.speedup("mix", name) / max(results.speedup("mix", way) for way in static)
    is_reached = "yes" if mix >= WANTED_MIX else "NO"
    return f"; mix over the best fixed length {mix:.3f} (wanted: {WANTED_MIX:.2f}: {is_reached})"


def to_dict(results: Results) -> dict[str, Any]:
    return {
        stream: {
            name: {
                "speedup": results.speedup(stream, name),
                "rounds": results.speedups(stream, name),
                "tps": [t.tps for t in timings],
                "n_drafted": (total := results.total(stream, name)).n_drafted,
                "n_accepted": total.n_accepted,
                "n_steps": total.n_steps,
                "tokens_per_step": total.n_tokens / max(1, total.n_steps),
                "acceptance_by_position": total.acceptance(),
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
    names = [name for name in results.ways() if name != OFF]
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
    parser.add_argument("--streams", default=",".join(STREAMS), type=lambda text: text.split(","))
    parser.add_argument("--cold", action="store_true", help="only the first round")
    parser.add_argument("--device", default="none")
    parser.add_argument("--cache", default="50%")
    parser.add_argument("--threads", type=int)
    clock = "cpu: CPU time of the servers, for a machine that others use too; with --threads 1"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=clock)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    if args.what == "synthetic" and args.model is None:
        parser.error("--model is needed: write one with scripts/make_synthetic_gguf.py")
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu needs --threads 1: threads that wait for each other take CPU time, too")
    if OFF not in args.controllers:
        parser.error(f"--controllers needs {OFF}, which the others are compared with")
    return args


def run(args: argparse.Namespace) -> None:
    """Measure, and show. Raises PyspacError."""
    here = machine.describe()
    results = {"demo": run_demo, "synthetic": run_synthetic}[args.what](args)
    title = (
        f"{args.what}, drafter {args.drafter}, {args.requests} x {args.predict} tokens, {args.rounds} rounds"
    )
    title += ", the first round" if args.cold else ""
    title += ", CPU time of the servers" if args.clock == "cpu" else ""
    show(results, title, args.drafter)
    print(machine.one_line(here))
    if args.json:
        row = {"machine": here, "arguments": vars(args), "results": to_dict(results)}
        args.json.write_text(json.dumps(row, indent=1, default=str) + "\n")
    if args.png:
        draw(results, args.png, title)


def main() -> int:
    try:
        run(parse())
    except PyspacError as error:
        print(f"bench_speculation: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
