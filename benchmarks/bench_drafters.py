"""Which drafter pays on which text? Drafters, each at several lengths and at `auto`, interleaved.

In: the demo target and what drafts for it. Out: a table or rows of JSON by drafter, length and text: tokens
per second, tokens per step, the speed as a share of plain decoding's, what drafting takes in a step, and what
share of the drafts held at each position. Each contender has a llama-server of its own, as `pyspac run` has.

    python benchmarks/bench_drafters.py --json -
    python benchmarks/bench_drafters.py --drafters ngram,draft-simple,ngram-map-k --lengths 4,8
    python benchmarks/bench_drafters.py --head HEAD.gguf --mtp ADAPTER.gguf

Texts: four kinds of places in those modules of the standard library that the demo models were not trained on
(pyspac/train/corpus.py); greedy, or sampled with `--temp`: each request has a seed of its own then, the same
for all contenders and rounds; each drafter's text is another even so, as drafts draw random numbers, too.
Every request is run by every contender before the next one, in another order each round. Two servers of one
contender differ by up to 4 %, for where their memory lies, so all are started `--sessions` times, with
`--rounds` rounds each time after one that is not measured. `none again` is plain decoding in another server:
how far its `ratio` is from 1 says how far others may be off by chance. `of_best` is the speed of `auto` as a
share of the best fixed length's with the same drafter, none included.

The requests are also divided by what plain decoding makes of them: `new`, if fewer than half of the threes of
tokens that end in its continuation came earlier in prompt or continuation, else `repeated`. (Threes, as
`ngram` looks for the last 4, 3 or 2 tokens; half, as most of what comes is then the one or the other.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import machine
from drafting import OFF, Results, Timing, Way

from pyspac.commands.bench_ways import Given
from pyspac.commands.demo import DRAFT, MODELS, TARGET
from pyspac.commands.json_file import STDOUT, can_write
from pyspac.errors import EXIT_INTERRUPTED, PyspacError
from pyspac.model.gguf_header import read_header
from pyspac.talk.interrupt import Interrupt
from pyspac.train.corpus import read_stdlib

AUTO: Final = "auto"
AGAIN: Final = "again"
ALL: Final = "all"  # texts together
NEW: Final = "new"
REPEATED: Final = "repeated"
N_SEEN: Final = 3  # tokens of a piece that came earlier, or did not
LORA: Final = "draft-lora"
HEAD: Final = "head"
DEFAULT_DRAFTERS: Final = ("ngram", "draft", LORA)  # and a head, if there is one
DEFAULT_LENGTHS: Final = (2, 4, 8)
LORA_LENGTHS: Final = (2, 4)  # unless --lengths says which
N_LINES: Final = 32  # of a place in a module

# ---- texts -----------------------------------------------------------------------------------------


def _share(lines: list[str], is_one: Callable[[str], bool]) -> float:
    return sum(map(is_one, lines)) / len(lines)


def _is_prose(line: str) -> bool:
    return len(line.split()) > 5 and not set("()=[]{}#\"'") & set(line)


def _is_statement(line: str) -> bool:
    return line.strip().startswith(("if ", "for ", "return", "self.", "def ", "try:", "raise ", "else:"))


def _is_import(line: str) -> bool:
    return line.strip().startswith(("import ", "from "))


def _repetition(lines: list[str]) -> float:
    """How alike lines are: letters and digits do not count, nor do empty lines."""
    shapes = ["".join("" if c.isalnum() else c for c in line) for line in lines if line.strip()]
    return 1 - len(set(shapes)) / max(1, len(shapes)) if len(shapes) > N_LINES // 2 else 0.0


KINDS: Final[dict[str, Callable[[list[str]], float]]] = {
    "code": lambda lines: _share(lines, _is_statement),
    "prose": lambda lines: _share(lines, _is_prose),
    "tables": lambda lines: _repetition(lines) - _share(lines, _is_prose) - _share(lines, _is_statement),
    "imports": lambda lines: _share(lines, _is_import),
}


@cache
def texts(n_requests: int) -> dict[str, list[str]]:
    """By kind: the places of the held-out modules that are most of that kind, one of a module at most."""
    modules = [module.text.splitlines() for module in read_stdlib() if module.is_held_out]
    places = [
        [lines[i : i + N_LINES] for i in range(0, max(1, len(lines) - N_LINES), N_LINES // 2)]
        for lines in modules
        if len(lines) >= N_LINES
    ]
    return {
        kind: ["\n".join(lines) for lines in sorted((max(p, key=how) for p in places), key=how)[-n_requests:]]
        for kind, how in KINDS.items()
    }


def repeats(prompt: list[int], text: list[int]) -> float:
    """What share of the threes of tokens ending in `text` came earlier in `prompt` or `text`; 0 of none."""
    tokens, seen, n_again = prompt + text, set[tuple[int, ...]](), 0
    for end in range(N_SEEN, len(tokens) + 1):
        piece = tuple(tokens[end - N_SEEN : end])
        n_again += end > len(prompt) and piece in seen
        seen.add(piece)
    return n_again / max(1, len(text))


# ---- contenders ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contender:
    """One drafter at one length; `length`: a number of tokens, `auto`, or `again`: plain decoding again."""

    drafter: str
    length: str
    flags: tuple[str, ...]  # of `pyspac run`

    @property
    def name(self) -> str:
        return OFF if self.length == "0" else f"{self.drafter} {self.length}"

    def text(self, args: argparse.Namespace) -> str:
        """All flags of its server."""
        where = ["--device", args.device, "--cache", args.cache]
        threads = ["-t", str(args.threads)] if args.threads else []
        return shlex.join([*where, *threads, *self.flags])


def contenders(args: argparse.Namespace) -> Iterator[Contender]:
    """Plain decoding first, twice; a line on stderr for a drafter that has no file."""
    yield Contender("none", "0", ())
    yield Contender("none", AGAIN, ())
    for drafter in args.drafters:
        path, flags = _drafter_flags(drafter, args)
        if path is not None and not path.is_file():
            print(f"{drafter} is left out: there is no file {path}", file=sys.stderr)
            continue
        if flags is None:
            print(f"{drafter} is left out: give its file with --{drafter} FILE", file=sys.stderr)
            continue
        lengths = args.lengths or (LORA_LENGTHS if drafter == LORA else DEFAULT_LENGTHS)
        for length in lengths:
            yield Contender(drafter, str(length), (*flags, "--draft-max", str(length)))
        cap = max(lengths) if drafter == LORA else args.draft_max
        yield Contender(drafter, AUTO, (*flags, "--draft-max", str(cap), "--speculation", AUTO))


def _drafter_flags(drafter: str, args: argparse.Namespace) -> tuple[Path | None, tuple[str, ...] | None]:
    """Its file, if it has one, and how to run it; None for the latter: no file was given."""
    if drafter == LORA:
        return args.mtp, ("--mtp", str(args.mtp))
    if drafter == HEAD:
        if args.head is None or not args.head.is_file():
            return args.head, None
        kind = "draft-eagle3" if read_header(args.head).architecture == "eagle3" else "draft-mtp"
        return args.head, ("--spec-type", kind, "-md", str(args.head))
    if drafter in ("draft", "draft-simple"):
        return args.model_draft, ("--spec-type", drafter, "-md", str(args.model_draft))
    return None, ("--spec-type", drafter)


class Requests:
    """Every request by every contender in turn, in another order each round."""

    def __init__(
        self,
        ways: dict[str, Way],
        shares: dict[str, list[float]],
        args: argparse.Namespace,
        rng: random.Random,
    ) -> None:
        """`shares` gets those of each text, by contender: see `repeats`. `rng`: of the orders."""
        self.ways, self.shares, self.args, self.rng = ways, shares, args, rng
        self.requests = [(kind, text) for kind, of_kind in texts(args.requests).items() for text in of_kind]

    def run(self, name: str, text: str, seed: int) -> Timing:
        way = self.ways[name]
        prompt = way.tokenize(text)[-self.args.prompt_tokens :]
        answer, timing = way.ask(prompt, self.args.predict, temperature=self.args.temp, seed=seed)
        self.shares[name].append(repeats(prompt, answer.token_ids))
        return timing

    def round(self) -> dict[str, dict[str, Timing]]:
        """[contender][text] -> what it did."""
        timings: dict[str, dict[str, Timing]] = {name: {} for name in self.ways}
        for seed, (kind, text) in enumerate(self.requests):
            order = self.rng.sample(list(self.ways), len(self.ways))
            found = {name: self.run(name, text, seed) for name in order}
            seen = REPEATED if self.shares[OFF][-1] >= 0.5 else NEW
            for name, one in found.items():
                for of in (kind, ALL, seen):
                    timings[name].setdefault(of, Timing()).add(one)
        return timings


def measure(found: list[Contender], args: argparse.Namespace) -> tuple[Results, dict[str, float]]:
    """All of them in turn on every request; see the top. And by contender what share of its texts repeats."""
    results, rng = Results(), random.Random(0)
    shares: dict[str, list[float]] = {contender.name: [] for contender in found}
    with Interrupt.watch() as interrupt:
        for _ in range(args.sessions):
            with ExitStack() as stack:
                ways = {c.name: stack.enter_context(open_way(c, args, interrupt)) for c in found}
                requests = Requests(ways, shares, args, rng)
                for i in range(1 + args.rounds):
                    for name, by_kind in requests.round().items():
                        for kind, timing in by_kind.items() if i else ():
                            results.add(kind, name, timing)
    return results, {name: fmean(some) for name, some in shares.items()}


def open_way(contender: Contender, args: argparse.Namespace, interrupt: Interrupt) -> Way:
    return Way(args.model, contender.text(args), interrupt, clock=args.clock)


def check(found: list[Contender], args: argparse.Namespace) -> None:
    """Raise PyspacError for what no server can be given, before one is started."""
    for contender in found:
        Given(model=args.model).way(contender.text(args), is_own=True)


# ---- rows ------------------------------------------------------------------------------------------


def rows(found: list[Contender], results: Results, shares: dict[str, float]) -> Iterator[dict[str, Any]]:
    """One per contender and text; see benchmarks/README.md."""
    for contender in found:
        for kind in (kind for kind in (*KINDS, ALL, NEW, REPEATED) if kind in results.timings):
            timings, total = results.timings[kind][contender.name], results.total(kind, contender.name)
            n_steps, n_drafted = max(1, total.n_steps), total.n_drafted
            ratios = results.speedups(kind, contender.name)
            row: dict[str, Any] = {"drafter": contender.drafter, "length": contender.length, "text": kind}
            row |= {
                "tps": round(median(t.tps for t in timings), 2),
                "tokens_per_step": round(total.n_tokens / n_steps, 3),
                "acceptance": round(total.n_accepted / n_drafted, 3) if n_drafted else None,
                "acceptance_by_position": total.acceptance(),
                "draft_us": round(total.draft_us / n_steps, 1),
                "ratio": round(results.speedup(kind, contender.name), 3),
                "ratio_rounds": [round(min(ratios), 3), round(max(ratios), 3)],
            }
            row["drafted_per_step"] = round(n_drafted / n_steps, 3)
            if kind == ALL:
                row["repeats"] = round(shares[contender.name], 3)
            if contender.length == AUTO:
                row["of_best"] = round(_of_best(found, results, kind, contender), 3)
            yield row


def _of_best(found: list[Contender], results: Results, kind: str, auto: Contender) -> float:
    """The speed of `auto` as a share of that of the best fixed length of its drafter, none included."""
    fixed = [c.name for c in found if c.drafter in (auto.drafter, "none") and c.length not in (AUTO, AGAIN)]
    return results.speedup(kind, auto.name) / max(results.speedup(kind, name) for name in fixed)


def show(found: list[dict[str, Any]]) -> None:
    print(
        f"{'drafter':14} {'length':>6} {'text':8} {'t/s':>8} {'per step':>8} {'held':>6} "
        f"{'draft us':>8} {'ratio':>6}"
    )
    for r in found:
        low, high = r["ratio_rounds"]
        print(
            f"{r['drafter']:14} {r['length']:>6} {r['text']:8} {r['tps']:8.1f} {r['tokens_per_step']:8.2f} "
            f"{'' if r['acceptance'] is None else format(r['acceptance'], '.2f'):>6} "
            f"{r['draft_us']:8.0f} {r['ratio']:6.2f} ({low:.2f} .. {high:.2f})"
            + (f", {r['of_best']:.3f} of the best length" if "of_best" in r else "")
        )


# ---- the command -----------------------------------------------------------------------------------


def at_least(low: int, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= low):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of {low} or more")
    return int(text)


positive = partial(at_least, 1)


def names(text: str) -> list[str]:
    if not (found := list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))):
        raise argparse.ArgumentTypeError(f"{text!r} names none: give one or more, with commas")
    return found


def lengths(text: str) -> list[int]:
    return list(dict.fromkeys(map(positive, names(text))))


def json_target(text: str) -> str:
    """A file that can be appended to, or that can be made; before anything is measured."""
    path = Path(text)
    is_good = path.is_file() and os.access(path, os.W_OK) if path.exists() else can_write(path)
    if text != STDOUT and not (text and is_good):
        raise argparse.ArgumentTypeError(f"{text!r}: give a file that can be written to, or - for stdout")
    return text


def temperature(text: str) -> float:
    try:
        if 0.0 <= (value := float(text)) <= 100.0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: give a number from 0 to 100")


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = f"default: {','.join(DEFAULT_DRAFTERS)}, and {HEAD} with --head"
    parser.add_argument("--drafters", type=names, help=f"names of --spec-type, and {HEAD}; {usual}")
    usual = f"default: {_listed(DEFAULT_LENGTHS)}; {LORA}: {_listed(LORA_LENGTHS)}"
    parser.add_argument("--lengths", type=lengths, help=f"the fixed ones, with commas; {usual}")
    parser.add_argument("--draft-max", type=positive, default=8, help="the most that auto drafts")
    parser.add_argument("--model", type=Path, default=TARGET)
    parser.add_argument("--model-draft", type=Path, default=DRAFT)
    parser.add_argument("--mtp", type=Path, default=MODELS / "demo-mtp.gguf", help="a gated LoRA")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 draft, or a file with an MTP head")
    usual = "measured rounds each time that all are opened; default: %(default)s"
    parser.add_argument("--rounds", type=positive, default=2, help=usual)
    usual = "how often all contenders are opened anew; default: %(default)s"
    parser.add_argument("--sessions", type=positive, default=3, help=usual)
    parser.add_argument("--requests", type=positive, default=2, help="per kind of text")
    parser.add_argument("--predict", type=partial(at_least, 2), default=128, help="tokens per request")
    parser.add_argument("--prompt-tokens", type=positive, default=200)
    parser.add_argument("--temp", type=temperature, default=0.0, help="0: greedy; sampled texts repeat less")
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", default="auto")
    clock = "cpu: CPU time of the servers, for a machine that others use too; with --threads 1"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=clock)
    parser.add_argument(
        "--json", type=json_target, metavar="FILE", help="append a line of JSON per row; - for stdout"
    )
    args = parser.parse_args()
    if args.head is not None and not args.head.is_file():
        parser.error(f"argument --head: there is no file {args.head}")
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu needs --threads 1: threads that wait for each other take CPU time, too")
    args.drafters = args.drafters or [*DEFAULT_DRAFTERS, *([HEAD] if args.head else [])]
    return args


def write(path: Path, lines: str) -> None:
    """Append them. Raises PyspacError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise PyspacError(f"{path}: the rows were not written ({error.strerror})") from error


def run(args: argparse.Namespace) -> None:
    """Measure, and show. Raises PyspacError."""
    about = machine.describe()
    found = list(contenders(args))
    check(found, args)
    result = list(rows(found, *measure(found, args)))
    if args.json != STDOUT:
        print(machine.one_line(about))
        show(result)
    if args.json:
        how = {"benchmark": "drafters", "model": args.model.name}
        how |= {"n_sessions": args.sessions, "n_rounds": args.rounds}
        how |= {"temp": args.temp, "n_threads": args.threads, "clock": args.clock, "machine": about}
        lines = "".join(json.dumps(row | how) + "\n" for row in result)
        if args.json == STDOUT:
            print(lines, end="")
        else:
            write(Path(args.json), lines)


def main() -> int:
    try:
        run(parse())
    except PyspacError as error:
        print(f"bench_drafters: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("bench_drafters: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
