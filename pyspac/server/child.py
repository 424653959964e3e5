"""A child process that never outlives its parent, in a process group of its own.

In: a command line. Out: a `Child` that can be asked, signalled and stopped, or what it said to its end. No
other file starts a program, but for one that has to outlive us (talk/remover.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final

from pyspac.errors import NoProcessError

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded between fork and exec
KILL_WAIT_S: Final = 10.0
TICK_S: Final = 0.1
STOP_S: Final = 5.0


@contextlib.contextmanager
def _stdin_with(text: str) -> Iterator[int]:
    """A file in memory, without a name: unlike a pipe it holds any text before it is read."""
    if not text:
        yield subprocess.DEVNULL
        return
    with os.fdopen(os.memfd_create("stdin"), "w+", encoding="utf-8") as file:
        file.write(text)
        file.seek(0)
        yield file.fileno()


@contextlib.contextmanager
def starting(name: str) -> Iterator[None]:
    """Inside the block a process is made. Raises NoProcessError if there are too many."""
    try:
        yield
    except BlockingIOError as error:
        raise NoProcessError(f"{name} cannot be started") from error


class Child:
    """A running program. Its stdin holds `text`; its stdout goes to our stderr, as ours is for what we say.

    A group of its own keeps Ctrl-C for us: we decide in which order things end. Start it from the main
    thread, as the kernel ties `death_signal` to the thread that forked.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,  # beside ours; None: without it
        death_signal: signal.Signals = signal.SIGTERM,  # what it gets when we are gone, however we went
        pass_stdout: bool = False,
        stdout: IO[bytes] | None = None,  # where its stdout goes instead
        stderr: IO[bytes] | None = None,
        text: str = "",  # what it reads from stdin
    ) -> None:
        parent = os.getpid()

        def die_with_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal))
            if os.getppid() != parent:  # gone between fork and prctl
                os._exit(1)

        self.name = name
        self.started_s = time.monotonic()
        variables = {**os.environ, **(env or {})}
        with _stdin_with(text) as stdin, starting(name):
            self._process = subprocess.Popen(
                list(argv),
                env={name: value for name, value in variables.items() if value is not None},
                stdin=stdin,
                stdout=stdout or (None if pass_stdout else 2),
                stderr=stderr,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self._process.poll()

    def end_text(self) -> str:
        """How it ended, for people: "llama-server (process 17) was killed by SIGKILL"."""
        code = self._process.returncode
        known = {number.value: number.name for number in signal.Signals}
        how = (
            f"was killed by {known.get(-code, f'signal {-code}')}" if code < 0 else f"exited with code {code}"
        )
        return f"{self.name} (process {self.pid}) {how}"

    def send(self, number: int) -> None:
        if self.exit_code() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout_s: float) -> bool:
        """End it: SIGTERM, and SIGKILL after `timeout_s`, which also ends a stopped process.

        Whether it went by itself.
        """
        self.send(signal.SIGTERM)
        if self.wait(timeout_s):
            return True
        self._process.kill()
        self.wait(KILL_WAIT_S)
        return False


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that has ended; `exit_code` as of `Child`."""

    exit_code: int
    stdout: str
    stderr: str


def run_to_end(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    on_tick: Callable[[], None] = lambda: None,
    timeout_s: float = math.inf,
    shows_stderr: bool = False,  # on ours, instead of keeping it
) -> Finished:
    """Run a program that ends by itself; `on_tick` is called ten times a second, and ends it by raising.

    Raises TimeoutError when it has run for longer than `timeout_s`.
    """
    with _in_memory() as stdout, _in_memory() as stderr:
        child = Child(
            name, argv, env=env, death_signal=signal.SIGKILL,
            stdout=stdout, stderr=None if shows_stderr else stderr,
        )  # fmt: skip
        try:
            while not child.wait(TICK_S):
                on_tick()
                if child.age_s > timeout_s:
                    raise TimeoutError(f"{name} ran for longer than {timeout_s:.0f} s")
        finally:
            child.stop(STOP_S)
        code = child.exit_code()
        assert code is not None
        return Finished(code, _text_of(stdout), _text_of(stderr))


def _in_memory() -> IO[bytes]:
    """A file that no full disk can cut short."""
    return os.fdopen(os.memfd_create("output"), "w+b")


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
