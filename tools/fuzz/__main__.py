"""Random operations on a context with the engine and on one without: are the bits the same, whatever comes?

    python -m tools.fuzz --minutes 60                 from seed 0 on, one case after another
    python -m tools.fuzz --seed 17 --cases 1          a seed again
    python -m tools.fuzz --replay failure.json        a list of operations, as a failure prints it
    make fuzz MINUTES=1

A case is a tiny random model, two contexts, and a list of operations: attaching and freeing the engine with
slots, with experts on disk, or both; decodes of random widths; cancels by the program's abort callback;
sequences removed, copied and shifted; states saved and restored; LoRA adapters; threads; decisions of a
scheduler; reads of the disk that fail, come short or are slow; threads that run out. Each case has a process
of its own.

Every decode's logits must be those of the other context to the last bit. One that is cancelled, or whose
experts cannot be read, must say so, and the next must be right again. The first failure ends the run with
exit code 1: its seed, and the shortest list of operations found that still fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tools.fuzz.plan import KINDS, MODES, Json, make_case
from tools.fuzz.shrink import shrink
from tools.fuzz.verdict import Runner, Verdict
from tools.soak.progress import Progress

SHRINK_S: Final = 120.0


class Fuzz:
    """One run: cases, and what was seen."""

    def __init__(self, args: argparse.Namespace, progress: Progress, runner: Runner) -> None:
        self.args, self.progress, self.runner = args, progress, runner
        self.n_cases = 0
        self.operations: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.failures: list[Json] = []
        self.begin_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin_s

    def run(self) -> None:
        if self.args.replay:
            self._run(json.loads(self.args.replay.read_text()))
            return
        for seed in range(self.args.seed, self.args.seed + self.args.cases):
            has_failed = bool(self.failures) and not self.args.keep_going
            if has_failed or self.seconds >= 60 * self.args.minutes:
                return
            self._run(make_case(seed, self.args.mode, self.args.without))

    def _run(self, case: Json) -> None:
        verdict = self.runner.run(case)
        self.n_cases += 1
        self.operations.update(operation["op"] for operation in case["operations"][: verdict.at + 1])
        self.counts.update(verdict.counts)
        if not verdict.has_passed:
            self._fail(case, verdict)
        self.progress.update(
            f"{self.seconds:.0f} s, seed {case['seed']}: {self.n_cases} cases, "
            f"{self.counts['decodes']} decodes, {self.counts['rows']} rows compared, "
            f"{len(self.failures)} failures"
        )

    def _fail(self, case: Json, verdict: Verdict) -> None:
        self.progress.phase(f"seed {case['seed']}: {verdict.kind}: {verdict.text}")
        if not self.args.no_shrink:
            self.progress.phase("looking for a shorter list of operations")
            case, verdict = shrink(case, verdict, self.runner.run, seconds=SHRINK_S)
        self.failures.append({"kind": verdict.kind, "text": verdict.text, "case": case})

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": not self.failures,
            "seed": self.args.seed,
            "seconds": round(self.seconds, 1),
            "cases": self.n_cases,
            "operations": dict(sorted(self.operations.items())),
            "decodes": self.counts["decodes"],
            "compared_rows": self.counts["rows"],
            "failed_on_purpose": {
                name: self.counts[name] for name in ("cancelled", "read_failed", "attach_refused", "no_room")
            },
            "failures": self.failures,
        }

    def print(self, console: Console) -> None:
        for failure in self.failures:
            case = failure["case"]
            console.print(f"seed {case['seed']}: {failure['kind']}: {failure['text']}", markup=False)
            console.print(
                f"{case['mode']}, {case['arch']} ({case['types']}), {case['context']}; after", markup=False
            )
            for operation in case["operations"]:
                console.print(f"    {json.dumps(operation)}", markup=False, soft_wrap=True)
        seen = self.to_dict()
        kinds = ", ".join(f"{n} {name}" for name, n in seen["operations"].items())
        ends = ", ".join(f"{n} {name}" for name, n in seen["failed_on_purpose"].items())
        console.print(f"{seen['cases']} cases in {seen['seconds']:.0f} s: {kinds}", markup=False)
        console.print(
            f"{seen['decodes']} decodes, {seen['compared_rows']} rows of logits compared; {ends}; "
            f"{len(self.failures)} failures",
            markup=False,
        )


def kinds(text: str) -> list[str]:
    """The kinds of operations in `text`. Raises ArgumentTypeError for unknown ones."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in KINDS or name == "decode"]:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown)} cannot be left out; there are {', '.join(KINDS)}"
        )
    return names


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long cases begin (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: 0)")
    parser.add_argument("--cases", type=int, default=sys.maxsize >> 1, help="at most (default: any number)")
    parser.add_argument("--mode", choices=MODES, help="of all cases (default: each its own)")
    parser.add_argument("--without", type=kinds, default=[], metavar="A,B,...", help="these operations")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one case as JSON, instead of seeds")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for a shorter list")
    parser.add_argument("--json", metavar="FILE", help="write what was seen as JSON; - for stdout")
    args = parser.parse_args(argv)
    if not 0 < args.minutes < math.inf or args.cases < 1 or args.seed < 0:  # nan is none
        parser.error("--minutes and --cases must be more than 0, and --seed not less")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console(file=sys.stderr, highlight=False, width=None if sys.stderr.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="pyspac-fuzz-") as folder:
        try:
            with Progress(console) as progress:
                fuzz = Fuzz(args, progress, Runner(Path(folder)))
                fuzz.run()
        except KeyboardInterrupt:
            return 130
    fuzz.print(console)
    if args.json:
        text = json.dumps(fuzz.to_dict(), indent=2)
        print(text) if args.json == "-" else Path(args.json).write_text(f"{text}\n")
    return 1 if fuzz.failures else 0


if __name__ == "__main__":
    sys.exit(main())
