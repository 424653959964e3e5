"""One soak: clients and faults against a server, and what was seen of it."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Final

import psutil

from pyspac.server import board_file
from tools.served import Serve, ServedError, wait_for
from tools.soak.asker import Asker
from tools.soak.clients import Clients, ask_everything, fill_contexts
from tools.soak.faults import make_faults
from tools.soak.faults.board import Remove
from tools.soak.faults.dealer import FaultDealer
from tools.soak.faults.fault import Site
from tools.soak.progress import Progress
from tools.soak.report import Report, summarise_memory
from tools.soak.stage import N_SLOTS, references_of_stock, staged, start_server
from tools.soak.tally import Tally

N_DEALERS: Final = 2  # faults at once, at most
PAUSE_S: Final = 1.5  # between two faults of a dealer, on average
WARM_UP_S: Final = 600.0  # before memory is looked at, as heaps settle; half the time, if that is less
BACK_S: Final = 60.0  # for the scheduler, after many deaths in a row


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
        fill_contexts(self.site.asker, N_SLOTS)
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

    def _is_alive(self, or_else: Callable[[str], None] | None = None) -> bool:
        alive = self.serve.process.poll() is None and psutil.pid_exists(self.serve.server_pid)
        if not alive and or_else is not None:
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
                    disk_folder=stage.disk, system=stage.system_faults(),
                )  # fmt: skip
                report = Soak(args, serve, site, progress).run()
            if serve.process.poll() is None and (code := serve.stop()) != 0:
                report.troubles.append(f"pyspac serve ended with exit code {code}, not 0")
        return report
