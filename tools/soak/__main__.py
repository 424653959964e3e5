"""A server under load from OpenAI's client while faults come at random: no answer lost, no text different.

    python -m tools.soak --minutes 30                        all faults
    python -m tools.soak --faults kill,stop,twin --seed 7    some of them
    python -m tools.soak --without truncate,remove           all but some
    make soak MINUTES=1

`pyspac serve` with the emulated device (`--device emulated`), four server slots, drafts of a length that the
scheduler chooses, and two random LoRA adapters; clients ask chats and completions, streamed and not, with and
without an adapter, more at once than there are server slots. Plain `llama-server` of the same build, without
the engine, was asked first, and its greedy answers are what the others must be to the letter. That holds
whatever the width of a batch, because questions ask only as far as no choice is close
(references.py here); so every difference is a failure.

Ends with counts, and with exit code 1 if an answer was lost or different, if a fault was not stood, or never
came within five minutes, or if the server's resident memory grew (judged over ten minutes or more, so from
`--minutes 20` on, after a warm-up of ten: the first quarter's lowest tenth against the last's, as some faults
hold memory while they last; the heap gives back at once what is freed).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from rich.console import Console

from tools.served import DRAFT, TARGET, ServedError
from tools.soak import namespace
from tools.soak.faults import FAULTS
from tools.soak.progress import Progress
from tools.soak.run import soak


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    lines = [f"    {fault.name:11} {fault.what}" for fault in FAULTS]
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak",
        description=__doc__,
        epilog="faults:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long faults come (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of questions, faults and pauses (default: 0)")
    parser.add_argument("--model", type=Path, default=TARGET, help="a MoE model (default: the demo's)")
    parser.add_argument(
        "--draft", type=Path, help="its draft model (default: the demo's, or none with another --model)"
    )
    parser.add_argument("--clients", type=int, default=6, help="that ask at the same time (default: 6)")
    known = [fault.name for fault in FAULTS]
    parser.add_argument("--faults", type=fault_names, default=known, metavar="A,B,...", help="default: all")
    parser.add_argument("--without", type=fault_names, default=[], metavar="A,B,...", help="all but these")
    parser.add_argument(
        "--max-growth", type=float, default=1.0, metavar="PERCENT", help="of the server's memory (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - for stdout")
    args = parser.parse_args(argv)
    if not 0 < args.minutes < math.inf or args.clients < 1:  # nan is none
        parser.error("--minutes and --clients must be more than 0")
    if args.draft is None and args.model == TARGET:
        args.draft = DRAFT
    args.faults = [name for name in args.faults if name not in args.without]
    return args


def fault_names(text: str) -> list[str]:
    """The names in `text`. Raises ArgumentTypeError for unknown ones."""
    known = [fault.name for fault in FAULTS]
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no fault {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    namespace.enter(["-m", "tools.soak", *(sys.argv[1:] if argv is None else argv)])
    console = Console(file=sys.stderr, highlight=False, width=None if sys.stderr.isatty() else 160)
    try:
        with Progress(console) as progress:
            report = soak(args, progress)
    except ServedError as error:
        console.print(f"soak: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    report.print(console)
    if args.json:
        text = json.dumps(report.to_dict(), indent=2)
        print(text) if args.json == "-" else Path(args.json).write_text(f"{text}\n")
    return 1 if report.why_failed() else 0


if __name__ == "__main__":
    sys.exit(main())
