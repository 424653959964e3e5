"""A llama-server of this command's own: options in, a `Client` of it out, and everything ended at the end.

It listens on a UNIX socket in a folder that only this user can open; the engine is inside, and the scheduler
runs on its board in a thread of this process, as `pyspac serve` has it in a process of its own.

It has nothing to save, so it is killed at the end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

import psutil

from pyspac.engine.rpc import split_endpoints
from pyspac.engine.rpc_servers import servers_that_fail
from pyspac.errors import ModelError, NoProcessError, PyspacError
from pyspac.server import board_file
from pyspac.server.arguments import n_threads
from pyspac.server.child import Child
from pyspac.server.options import ServeOptions
from pyspac.server.plan import Plan, plan_launch
from pyspac.server.start import start_server
from pyspac.talk.client import UNIX, Client, LostError, RefusedError
from pyspac.talk.interrupt import Interrupt, ends_at_signals
from pyspac.talk.remover import removed_if_killed

if TYPE_CHECKING:
    from pyspac.engine.board import Board
    from pyspac.server.attachment import Attachment
    from pyspac.talk.figures import Figures

Progress = Callable[[int, int], None]  # bytes of the model that are loaded, and all

PREFIX: Final = "pyspac-server-"  # of the folders' names
_LOCK: Final = "lock"
_MAX_PARENT: Final = 70  # bytes: a socket's path has 107 at most
_POLL_S: Final = 0.02
_LAST_WORDS_S: Final = 0.5  # from the end of its answers to its own
_N_LINES: Final = 6  # of its log, where it fails
_NOTE: Final = "spac:"  # how the engine's lines begin; it goes on with fewer threads
_TELLING: Final = (_NOTE, "error", "failed", "what():")
_NO_MORE: Final = os.strerror(errno.EAGAIN)  # processes or threads
_BAD_GRAMMAR: Final = "failed to parse grammar"  # an exception that llama-server does not catch


class OwnServer:
    """One running llama-server; a context manager. `launch` is what was chosen for it."""

    def __init__(
        self,
        options: ServeOptions,
        interrupt: Interrupt | None = None,
        on_progress: Progress = lambda n_bytes, total: None,
        *,
        verbose: bool = False,
    ) -> None:
        """Raises ConfigError or ModelError before anything is started; KeyboardInterrupt if `interrupt`."""
        self._interrupt = Interrupt() if interrupt is None else interrupt  # one that is not set is false
        self._stack = ExitStack()
        self.board: Board | None = None  # None: there is no engine
        self.attachment: Attachment | None = None  # None: nothing is to be decided
        with self._stack:
            self._stack.enter_context(ends_at_signals())
            folder = self._stack.enter_context(private_folder())
            options = replace(options, socket=folder / "server.sock", board=_board_of(folder))
            plan = self._plan(options)
            self.options, self.launch = plan.options, plan.launch
            self._log: IO[bytes] | None = None if verbose else (folder / "log").open("w+b")
            self.server = start_server(self.options, self.launch, self._log, signal.SIGKILL)
            self._stack.callback(self._stop)
            _load_scheduler()
            self.client = Client(f"{UNIX}{folder / 'server.sock'}")
            self._wait(on_progress)
            self._attach()
            self._stack = self._stack.pop_all()

    @property
    def device_name(self) -> str:
        return self.launch.device

    @property
    def n_threads(self) -> int:
        return n_threads(self.options)

    def figures(self) -> Figures:
        """What its engine and scheduler do from now on."""
        from pyspac.talk.figures import Figures

        return Figures(self.board, self.attachment, self.options.attach.scheduler.predict)

    # ---- beginning

    def _plan(self, options: ServeOptions) -> Plan:
        try:
            return plan_launch(options, is_stopped=lambda: bool(self._interrupt))
        except PyspacError as error:
            if self._interrupt:  # what it waited for was stopped, or got the terminal's Ctrl-C as well
                raise KeyboardInterrupt from error
            raise

    def _wait(self, on_progress: Progress) -> None:
        """Until the model is loaded. Raises ModelError if it cannot be."""
        total = self.launch.model_bytes
        while not self._is_ready():
            if self.server.exit_code() is not None:
                raise self._end_error(" while it loaded the model", ModelError)
            if self._interrupt:
                raise KeyboardInterrupt
            on_progress(min(total, _memory_of(self.server)), total)
            time.sleep(_POLL_S)
        on_progress(total, total)

    def _is_ready(self) -> bool:
        try:
            with self._interrupt.cancels(self.client):
                self.client.get("/health")
        except RefusedError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return False
        except LostError:
            return False
        return True

    def _attach(self) -> None:
        if not self.launch.has_engine:
            return
        from pyspac.engine.board import Board
        from pyspac.talk.scheduling import scheduling

        name = self.launch.board
        if board_file.look_at(name) is None:  # a full /dev/shm; the engine only needs it beside a device
            return
        self.board = self._stack.enter_context(Board.open(name))
        if self.options.has_scheduler:
            attach = replace(self.options.attach, model=self.launch.model)
            self.attachment = self._stack.enter_context(scheduling(self.board, attach, name))

    # ---- the end

    def explain(self, error: LostError) -> PyspacError:
        """`error` with what is known of its cause."""
        if not self.server.wait(_LAST_WORDS_S):
            return error
        return self._end_error()

    def _end_error(self, when: str = "", kind: type[PyspacError] = PyspacError) -> PyspacError:
        """Why the server ended: `kind`, unless a signal ended it or the machine had no more for it."""
        what, words = f"{self.server.end_text()}{when}", self.last_words()
        log = self._log_lines()
        if any(_NO_MORE in line for line in log if not line.startswith(_NOTE)):
            return NoProcessError(what, words)
        is_input = (self.server.exit_code() or 0) >= 0 or any(_BAD_GRAMMAR in line for line in log)
        return (kind if is_input else PyspacError)(what + words)

    def last_words(self) -> str:
        """Which RPC servers are gone; else the end of the server's log, unless it was shown."""
        rpc = self.options.rpc
        if rpc and not self.options.stock and (gone := servers_that_fail(split_endpoints(rpc))):
            return f", as {' and '.join(gone)} is gone: {'; '.join(gone.values())}"
        if self.server.exit_code() == -signal.SIGKILL:
            return ", by another process or for lack of memory"
        if self._log is None:
            return "; its log is above"
        lines = self._log_lines()
        told = [line for line in lines if any(word in line.lower() for word in _TELLING) or " E " in line]
        return "".join(f"\n  {line}" for line in (told or lines)[-_N_LINES:])

    def _log_lines(self) -> list[str]:
        """None where the log was shown."""
        if self._log is None:
            return []
        self._log.seek(0)
        return self._log.read().decode(errors="replace").splitlines()

    def _stop(self) -> None:
        self.server.stop(0)
        board_file.remove_stale(self.launch.board)
        if self._log is not None:
            self._log.close()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _load_scheduler() -> None:
    """Its modules and numpy, while the server loads its model."""
    from pyspac.talk import figures, scheduling  # noqa: F401


def _memory_of(child: Child) -> int:
    """Bytes that it has in memory: what was loaded of the model, for the most part."""
    try:
        return int(psutil.Process(child.pid).memory_info().rss)
    except psutil.Error:
        return 0


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700, removed at the end, and with its board if this process is killed.

    What a whole killed session left goes, too.
    """
    _remove_stale()
    folder, lock = _new_folder()
    with lock, removed_if_killed((folder, board_file.path_of(_board_of(folder)))):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _parent() -> Path:
    """The folder for temporary files, or another one where a socket there would be no address."""
    others = (os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp")
    all_ = (tempfile.gettempdir(), *others)
    fit = (name for name in all_ if len(os.fsencode(name)) <= _MAX_PARENT and "," not in name)
    return Path(next((name for name in fit if os.access(name, os.W_OK | os.X_OK)), tempfile.gettempdir()))


def _new_folder() -> tuple[Path, IO[str]]:
    """A folder, and its lock; another command that begins may have taken one for left before it had it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_parent()))
        lock = (folder / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        lock.close()


def _board_of(folder: Path) -> str:
    """The name of the board of the server whose folder it is."""
    return f"run-{folder.name.removeprefix(PREFIX)}"


def _remove_stale() -> None:
    for folder in _parent().glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if folder.stat().st_uid == os.getuid() and _is_left(folder):
                board_file.remove_stale(_board_of(folder))
                if not board_file.path_of(_board_of(folder)).exists():  # else its server is just ending
                    shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Whether the command that made it is gone; one without a lock may be just being made."""
    with (folder / _LOCK).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
