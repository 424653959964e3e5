"""A program on a terminal of its own: keys in, what it shows out."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import ioctl

TIMEOUT_S = 60.0


class Terminal:
    """`shown` is all that came so far, control sequences included."""

    def __init__(self, *arguments: str, variables: Mapping[str, str], program: Sequence[str] = ()) -> None:
        """Run `python -m pyspac ARGUMENTS` on 100 columns; or `program`, with `variables` only."""
        self.shown = ""
        self._seen = 0
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            argv = [*(program or (sys.executable, "-m", "pyspac")), *arguments]
            os.execve(argv[0], argv, {**({} if program else os.environ), "TERM": "xterm", **variables})
        ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))

    def wait_for(self, text: str) -> str:
        """What came since the last call, up to and with `text`."""
        end_s = time.monotonic() + TIMEOUT_S
        while (at := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < end_s, f"{text!r} did not come:\n{self.shown}"
            self._read(0.2)
        start, self._seen = self._seen, at + len(text)
        return self.shown[start : self._seen]

    def _read(self, timeout_s: float) -> bool:
        """False: it has ended."""
        if not select.select([self._file], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._file, 65536)
        except OSError:  # no one has it open any more
            return False
        answer_cursor_requests(self._file, data)
        self.shown += data.decode(errors="replace")
        return bool(data)

    def press(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def exit_code(self) -> int:
        """After it has ended by itself."""
        end_s = time.monotonic() + TIMEOUT_S
        while self._read(0.2) and time.monotonic() < end_s:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def answer_cursor_requests(file: int, data: bytes) -> None:
    """As a terminal does; prompt_toolkit asks where the cursor is."""
    for _ in range(data.count(b"\x1b[6n")):
        os.write(file, b"\x1b[1;1R")


@contextmanager
def on_terminal(
    *arguments: str, variables: Mapping[str, str], program: Sequence[str] = ()
) -> Iterator[Terminal]:
    terminal = Terminal(*arguments, variables=variables, program=program)
    try:
        yield terminal
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        os.close(terminal._file)
