"""`pyspac serve`: starts llama-server and the scheduler, keeps them running, and ends both.

In: ServeOptions. Out: an exit code. Everything is decided in one thread that looks at both children ten times
a second; a signal only sets a flag.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Final

from pyspac.engine.rpc import NoAnswerError
from pyspac.errors import EXIT_INTERRUPTED, PyspacError
from pyspac.server import board_file, log
from pyspac.server.arguments import Launch, attach_argv
from pyspac.server.backoff import Backoff
from pyspac.server.child import Child
from pyspac.server.download import StoppedError
from pyspac.server.drain import drain
from pyspac.server.health import is_healthy
from pyspac.server.keep import DEFAULT_MIB
from pyspac.server.options import ServeOptions
from pyspac.server.plan import plan_launch, without_lost
from pyspac.server.settings import to_json
from pyspac.server.start import start_server

TICK_S: Final = 0.1
HEALTH_PERIOD_S: Final = 0.2
SERVER_STOP_S: Final = 20.0  # answers under way are cut off; what takes longer hangs
SLOW_MIB_S: Final = 100.0
SCHEDULER_STOP_S: Final = 3.0
FIRST_STARTS: Final = 3  # with --restart; what never was ready will not be: a wrong option, too little memory
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerDiedError(PyspacError):
    """llama-server ended without being told to."""


@dataclass(slots=True)
class Signals:
    """The signals that came while `watch` was in force."""

    received: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        heard = [number for number in _STOP_SIGNALS if not _is_for_good(number)]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)

    def __bool__(self) -> bool:
        return bool(self.received)

    def exit_code(self) -> int:
        """After the first one."""
        return EXIT_INTERRUPTED if self.received[0] == signal.SIGINT else 0


def _is_for_good(number: signal.Signals) -> bool:
    """Whether it is SIGHUP and `nohup` has us ignore it: the terminal may close."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class Supervisor:
    """The two children of one `pyspac serve`."""

    def __init__(
        self, options: ServeOptions, launch: Launch, signals: Signals, given: ServeOptions | None = None
    ) -> None:
        """`options`: on the device that was found; `given`: as they were before."""
        self.options = options
        self.launch = launch
        self._given = given or options
        self._n_devices = launch.n_devices  # of all RPC servers that were given
        self.signals = signals
        self.server: Child | None = None
        self.scheduler: Child | None = None
        self._is_ready = False
        self._was_ready = False  # any of those that were started
        self._n_failed_starts = 0
        self._scheduler_backoff = Backoff(first_s=0.0, longest_s=30.0)
        self._server_backoff = Backoff(first_s=0.5, longest_s=60.0)
        self._scheduler_due_s = 0.0

    def run(self) -> int:
        """Serve until a signal comes. Raises ServerDiedError if the server dies and may not be restarted."""
        try:
            while not self.signals:
                self._start_server()
                self._is_ready = self._wait_until_healthy()
                if self._is_ready:
                    self._was_ready = True
                    self._supervise()
                else:
                    self._n_failed_starts += 1
                if not self.signals:
                    self._after_death()
            return self.signals.exit_code()
        finally:
            self.stop()

    # ---- the server

    def _start_server(self) -> None:
        self._is_ready = False
        self.server = start_server(self.options, self.launch)

    def _wait_until_healthy(self) -> bool:
        """False: it died, or a signal came."""
        assert self.server is not None
        host, prefix, is_tls = self.options.host, self.options.api_prefix, self.options.is_tls
        while not self.signals and self.server.exit_code() is None:
            if is_healthy(host, self.launch.port, prefix, is_tls=is_tls):
                self._say_ready()
                return True
            time.sleep(HEALTH_PERIOD_S)
        return False

    def _say_ready(self) -> None:
        assert self.server is not None
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        url = f"{'https' if self.options.is_tls else 'http'}://{host}:{self.launch.port}"
        log.event(
            f'ready: {url}, board "{self.launch.board}"',
            event="ready", url=url, board=self.launch.board, server_pid=self.server.pid,
        )  # fmt: skip
        if self.options.is_open:
            log.warning(
                f"everyone who reaches {url} may use it: give it a key (LLAMA_API_KEY), or leave out --host",
                event="open",
            )
        if not self.launch.has_engine:
            log.warning(
                "the engine has no kernels for this model's types on this machine: llama.cpp's own serve it, "
                "without a board, a scheduler or its metrics"
            )
        elif not self.options.has_scheduler:
            log.event("no scheduler: without a device there is nothing to place")

    def _supervise(self) -> None:
        """Until the server dies or a signal comes."""
        assert self.server is not None
        while not self.signals and self.server.exit_code() is None:
            self._keep_scheduler()
            time.sleep(TICK_S)

    def _after_death(self) -> None:
        """Clean up after a server that died; raise, or wait before the next one starts."""
        assert self.server is not None
        text, age_s, pid = self.server.end_text(), self.server.age_s, self.server.pid
        # its board says that the model was loaded, where its health was not asked for in between
        self._was_ready = self._was_ready or board_file.look_at(self.launch.board) is not None
        self._stop_scheduler()
        board_file.remove_stale(self.launch.board)
        self.server = None
        if not self.options.restart:
            raise ServerDiedError(f"{text}; its log is above (--restart would start it again)")
        if not self._was_ready and self._n_failed_starts >= FIRST_STARTS:
            raise ServerDiedError(
                f"{text}; it ended {self._n_failed_starts} times before it was ready, so it is not started "
                "again: its log is above"
            )
        delay_s = self._server_backoff.after(age_s)
        log.warning(f"{text}; starting it again in {delay_s:.1f} s", event="server_died", pid=pid)
        self._sleep(delay_s)
        while self._given.rpc and not self.signals and not self._plan_again():
            self._sleep(self._server_backoff.after(0.0))

    def _plan_again(self) -> bool:
        """With the RPC servers that there are now, where it ran before; False: they are too few.

        It is not started then: llama-server would wait without end for one that only takes connections.
        Raises PyspacError for what waiting does not mend.
        """
        try:
            given = without_lost(self._given, self._n_devices)
            given = replace(given, port=self.launch.port, board=self.launch.board)
            plan = plan_launch(given, is_stopped=lambda: bool(self.signals))
        except StoppedError:
            return False
        except NoAnswerError as error:
            log.warning(f"not started yet: {error}", event="rpc_missing")
            return False
        self.options, self.launch = plan.options, plan.launch
        return True

    def _sleep(self, seconds: float) -> None:
        """Until then, or until a signal comes."""
        end_s = time.monotonic() + seconds
        while not self.signals and time.monotonic() < end_s:
            time.sleep(TICK_S)

    # ---- the scheduler

    def _keep_scheduler(self) -> None:
        """Start the scheduler if it is not there: again after it died, or when the board (re)appears."""
        is_wanted = self.launch.has_engine and self.options.has_scheduler
        if not is_wanted or (self.scheduler and self.scheduler.exit_code() is None):
            return
        if self.scheduler is not None:
            self._note_scheduler_end(self.scheduler)
        board = board_file.look_at(self.launch.board)
        if time.monotonic() >= self._scheduler_due_s and board is not None and board.is_alive:
            self._start_scheduler()

    def _note_scheduler_end(self, scheduler: Child) -> None:
        delay_s = self._scheduler_backoff.after(scheduler.age_s)
        self._scheduler_due_s = time.monotonic() + delay_s
        self.scheduler = None
        if board_file.look_at(self.launch.board) is None:
            log.event("llama-server unloaded the model; the scheduler waits until it is loaded again")
            return
        log.warning(
            f"the {scheduler.end_text()}; the server goes on with the last decisions for a while, "
            f"the scheduler is started again in {delay_s:.1f} s",
            event="scheduler_died", pid=scheduler.pid,
        )  # fmt: skip

    def _start_scheduler(self) -> None:
        attach = replace(self.options.attach, model=self.launch.model)
        self.scheduler = Child(
            "scheduler",
            attach_argv(self.launch.board),
            text=to_json(attach),
            death_signal=signal.SIGKILL,  # it may be stopped; it saves every minute
            pass_stdout=attach.log_json,
        )
        log.event(
            f"scheduler: process {self.scheduler.pid}", event="scheduler_started", pid=self.scheduler.pid
        )

    # ---- the end

    def stop(self) -> None:
        """End both children, the server first: the scheduler's last decisions are for it. Leaves no board."""
        if self.server is not None:
            self._stop_server(self.server)
        self._stop_scheduler()

    def _stop_server(self, server: Child) -> None:
        n_signals = len(self.signals.received)
        if self._is_ready and self.options.drain_s > 0 and self.signals.received[:1] == [signal.SIGTERM]:
            drain(
                server, self.options, self.launch.port,
                limit_s=self.options.drain_s,
                is_stopped=lambda: len(self.signals.received) > n_signals,
            )  # fmt: skip
            n_signals = len(self.signals.received)
        server.send(signal.SIGTERM)
        end_s = time.monotonic() + SERVER_STOP_S + self._writing_s()
        while not server.wait(TICK_S):
            if time.monotonic() > end_s or len(self.signals.received) > n_signals:  # a second Ctrl-C
                log.warning(f"{server.name} does not end; killing it")
                server.stop(0)
        board_file.remove_stale(self.launch.board)

    def _writing_s(self) -> float:
        """What prompts that are kept may take, on a slow disk."""
        return 0.0 if self.options.keep is None else (self.options.keep_mib or DEFAULT_MIB) / SLOW_MIB_S

    def _stop_scheduler(self) -> None:
        if self.scheduler is not None and not self.scheduler.stop(SCHEDULER_STOP_S):
            log.warning(f"{self.scheduler.name} did not end by itself and was killed")
        self.scheduler = None


def serve(options: ServeOptions) -> int:
    """Run until a signal comes; the exit code. Raises a PyspacError for bad input or if the server dies."""
    signals = Signals()
    with signals.watch():
        try:
            plan = plan_launch(options, is_stopped=lambda: bool(signals))
        except StoppedError:
            return signals.exit_code()
        return Supervisor(plan.options, plan.launch, signals, options).run()
