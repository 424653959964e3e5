#!/usr/bin/env python3
"""A server under load from OpenAI's client while faults come at random: no answer lost, no text different.

    python scripts/soak.py --minutes 30                        all faults
    python scripts/soak.py --faults kill,stop,twin --seed 7    some of them
    python scripts/soak.py --without truncate,remove           all but some
    make soak MINUTES=1

`pyspac serve` with the emulated device (`--device cpu`), four server slots, drafts of a length that the
scheduler chooses, and two random LoRA adapters; clients ask chats and completions, streamed and not, with and
without an adapter, more at once than there are server slots. Plain `llama-server` of the same build, without
the engine, was asked first, and its greedy answers are what the others must be to the letter. That holds
whatever the width of a batch, because questions ask only as far as no choice is close
(scripts/soak_clients.py); so every difference is a failure.

Ends with counts, and with exit code 1 if an answer was lost or different, if a fault was not stood, or never
came within five minutes, or if the server's resident memory grew (judged over ten minutes or more, so from
`--minutes 13` on, between the medians of the first and the last tenth after a warm-up of three minutes; the
heap gives back at once what is freed).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import soak_namespace
from rich.console import Console
from served import DRAFT, ONE_THREAD, TARGET, Serve, ServedError, llama_server, wait_for
from soak_adapters import write_adapters
from soak_clients import (
    Answer,
    Asker,
    Clients,
    Question,
    Tally,
    all_questions,
    ask_everything,
    find_references,
)
from soak_faults import FAULTS, FaultDealer, Remove, Site, make_faults
from soak_report import Report, summarise_memory

from pyspac._native import bin_dir
from pyspac.server import board_file

N_SLOTS: Final = 4
SHM_MIB: Final = 64
DISK_MIB: Final = 256
N_DEALERS: Final = 2  # faults at once, at most
PAUSE_S: Final = 1.5  # between two faults of a dealer, on average
WARM_UP_S: Final = 180.0  # before memory is looked at; half the time, if that is less
BACK_S: Final = 60.0  # for the scheduler, after many deaths in a row
# of the server's heap: what is freed goes back at once, so that resident memory is memory in use. Else
# buffers that grow leave holes: plain llama-server's went from 70 to 75 MiB in five minutes, by way of 78
TIGHT_HEAP: Final = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
}  # fmt: skip
SAY_S: Final = 30.0  # between two lines of progress where there is no terminal


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    lines = [f"    {fault.name:11} {fault.what}" for fault in FAULTS]
    parser = argparse.ArgumentParser(
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
    if args.minutes <= 0 or args.clients < 1:
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


class Progress:
    """One line that says what is going on: at the bottom of a terminal, now and then in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        self._said_s = 0.0

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._status:
            self._status.stop()

    def phase(self, text: str) -> None:
        """Something new begins."""
        self._console.print(text, markup=False)

    def update(self, text: str) -> None:
        """How far it is."""
        if self._status:
            self._status.update(text)
        elif time.monotonic() > self._said_s + SAY_S:
            self._said_s = time.monotonic()
            self._console.print(text, markup=False)


@dataclass(slots=True)
class Stage:
    """What is there before the server runs."""

    folder: Path
    shm: Path | None
    disk: Path | None
    adapters: list[Path]

    @property
    def cache_folder(self) -> Path:
        return self.folder / "cache"  # where `Serve` has pyspac keep what it learns

    @property
    def slots_folder(self) -> Path:
        return self.cache_folder / "slots"

    def adapter_arguments(self) -> list[str]:
        """For llama-server: both loaded, none on."""
        return ["--lora", ",".join(map(str, self.adapters)), "--lora-init-without-apply"]


@contextlib.contextmanager
def staged(model: Path, seed: int) -> Iterator[Stage]:
    """A folder, small file systems of our own where they are allowed, and the adapters."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyspac-soak-")))
        (folder / "cache").mkdir()
        shm = stack.enter_context(soak_namespace.mounted(soak_namespace.SHM, SHM_MIB))
        disk = stack.enter_context(soak_namespace.mounted(folder / "cache", DISK_MIB))
        stage = Stage(folder, shm, disk, write_adapters(folder, model, seed))
        stage.slots_folder.mkdir()
        yield stage


def references_of_stock(args: argparse.Namespace, stage: Stage) -> dict[Question, Answer]:
    """Plain llama-server's answers, one at a time, without engine, drafts and weights in another layout."""
    arguments = ["-np", "1", "-t", "1", "--no-repack", "--cache-ram", "0", *stage.adapter_arguments()]
    with llama_server(bin_dir(), stage.folder, *arguments, draft=False, target=args.model) as port:
        asker = Asker(f"http://127.0.0.1:{port}", n_adapters=len(stage.adapters), adapter_slot=0)
        with contextlib.closing(asker):
            return find_references(asker, all_questions(len(stage.adapters), args.seed))


def start_server(args: argparse.Namespace, stage: Stage) -> Serve:
    passed = ["-np", str(N_SLOTS), *ONE_THREAD, "--cache-ram", "0", *stage.adapter_arguments()]
    passed += ["--slot-save-path", f"{stage.slots_folder}/"]
    drafting = ["--speculation", "auto"] if args.draft else []
    return Serve(
        stage.folder, *drafting, passed=passed, draft=args.draft is not None,
        pair=(args.model, args.draft or DRAFT), variables=TIGHT_HEAP,
    )  # fmt: skip


def n_events(serve: Serve, name: str) -> int:
    return sum(event.get("event") == name for event in list(serve.events))


def is_scheduler_back(serve: Serve, site: Site) -> bool:
    """Whether it runs and has decided."""
    names = [event.get("event") for event in list(serve.events)]
    last = [name for name in names if name in ("scheduler_started", "attached")][-1:]
    return last == ["attached"] and site.scheduler() is not None


class Soak:
    """One run, against a server that has started."""

    def __init__(self, args: argparse.Namespace, serve: Serve, site: Site, progress: Progress) -> None:
        self.args, self.serve, self.site, self.progress = args, serve, site, progress
        self.faults = make_faults(args.faults, site, args.seed)
        self.dealer = FaultDealer(self.faults, site.stop, n=N_DEALERS, pause_s=PAUSE_S, seed=args.seed)
        self.samples: list[tuple[float, int]] = []  # (seconds, bytes resident)
        self.report = Report(
            args.seed, args.max_growth, site.tally, self.dealer.counts, self.dealer.failures,
            n_questions=len(site.references),
        )  # fmt: skip

    def run(self) -> Report:
        """All of it; the server is left running, if it still does."""
        for name, count in self.dealer.counts.items():
            if count.skipped:
                self.progress.phase(f"the fault {name} is SKIPPED: {count.skipped}")
        start_s = time.monotonic()
        self._ask_everything("without faults")
        self._soak()
        self.report.seconds = time.monotonic() - start_s
        if self._is_alive():
            self._look_at_scheduler()
            self._ask_everything("after the faults")
            self._remove_board()
        self._is_alive(or_else=self.report.troubles.append)
        self.report.n_scheduler_restarts = max(0, n_events(self.serve, "scheduler_started") - 1)
        self.report.memory = summarise_memory(self.samples)
        return self.report

    def _is_alive(self, or_else: object = None) -> bool:
        alive = self.serve.process.poll() is None and psutil.pid_exists(self.serve.server_pid)
        if not alive and callable(or_else):
            or_else(f"the server died:\n{self.serve.log()[-1500:]}")
        return alive

    def _ask_everything(self, when: str) -> None:
        site = self.site
        self.progress.phase(f"asking {len(site.references)} questions, each whole and streamed, {when}")
        ask_everything(site.asker, site.references, site.tally, self.args.clients)

    def _soak(self) -> None:
        """Clients and faults, for as long as was asked for or until the server dies."""
        site, args = self.site, self.args
        clients = Clients(site.asker, site.references, site.tally, n=args.clients, seed=args.seed)
        self.progress.phase(f"{args.minutes:g} minutes with {args.clients} clients and faults")
        clients.start()
        self.dealer.start()
        start_s, seconds = time.monotonic(), 60 * args.minutes
        while (passed_s := time.monotonic() - start_s) < seconds and self._is_alive():
            if passed_s >= min(WARM_UP_S, seconds / 2):
                self._sample(passed_s)
            self.progress.update(self._line(passed_s, seconds))
            time.sleep(1)
        site.stop.set()
        self.dealer.join()
        clients.stop()

    def _sample(self, passed_s: float) -> None:
        with contextlib.suppress(psutil.Error):
            self.samples.append((passed_s, psutil.Process(self.serve.server_pid).memory_info().rss))

    def _line(self, passed_s: float, seconds: float) -> str:
        tally = self.site.tally
        n_applied = sum(count.n_applied for count in self.dealer.counts.values())
        mib = f", {self.samples[-1][1] / (1 << 20):.1f} MiB" if self.samples else ""
        return (
            f"{passed_s:.0f} of {seconds:.0f} s: {n_applied} faults, {tally.n_complete} answers right, "
            f"{tally.n_cut} cut, {tally.n_lost} lost, {tally.n_different} different{mib}"
        )

    def _look_at_scheduler(self) -> None:
        try:
            wait_for("the scheduler", lambda: is_scheduler_back(self.serve, self.site), BACK_S)
        except ServedError:
            self.report.troubles.append(f"the scheduler was not back {BACK_S:.0f} s after the last fault")

    def _remove_board(self) -> None:
        """For good, with the scheduler: the last decision stays, or the built-in policy decides."""
        for fault in self.faults:
            if isinstance(fault, Remove) and self._is_alive():
                fault.for_good()
                self._ask_everything("with the board gone for good")


def soak(args: argparse.Namespace, progress: Progress) -> Report:
    """Set everything up, run, and end it."""
    with staged(args.model, args.seed) as stage:
        progress.phase("asking plain llama-server")
        references = references_of_stock(args, stage)
        with start_server(args, stage) as serve:
            serve.wait_ready()
            asker = Asker(serve.url, n_adapters=len(stage.adapters), adapter_slot=N_SLOTS - 1)
            with contextlib.closing(asker):
                site = Site(
                    serve, args.model, board_file.path_of(serve.board), asker, references, Tally(),
                    n_slots=N_SLOTS, slots_folder=stage.slots_folder, shm_folder=stage.shm,
                    disk_folder=stage.disk,
                )  # fmt: skip
                report = Soak(args, serve, site, progress).run()
            if serve.process.poll() is None and (code := serve.stop()) != 0:
                report.troubles.append(f"pyspac serve ended with exit code {code}, not 0")
        return report


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    soak_namespace.enter([str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)])
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
