"""A system that has no more processes or threads: one line that says so, and exit code 1."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from serving import TARGET
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.errors import ModelError, NoProcessError, PyspacError
from pyspac.server.child import Child
from pyspac.talk.own_server import OwnServer
from pyspac.talk.remover import removed_if_killed

ENDED = "llama-server ended"
NOTE = b"spac: the weights are read one by one: Resource temporarily unavailable\n"


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_fields: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess.Popen, "_execute_child", fail)


@pytest.mark.usefixtures("no_fork")
def test_a_child_that_cannot_be_made() -> None:
    with pytest.raises(NoProcessError, match=r"^true cannot be started, as .* raise the limit \(ulimit -u"):
        Child("true", ["/bin/true"])
    with pytest.raises(NoProcessError, match=r"^/bin/sh cannot be started"), removed_if_killed(()):
        pass


@pytest.mark.usefixtures("no_fork")
def test_a_command_without_a_process() -> None:
    result = CliRunner().invoke(app, ["run", "-m", str(TARGET), "-p", "a", "-n", "1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("pyspac: error: ")
    assert result.stderr.count("\n") == 1


def test_a_command_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "pyspac: error: a thread cannot be started, as there are no more" in result.stderr


def ended(code: int, log: bytes) -> PyspacError:
    """What is said of a server that ended so while it loaded."""
    own = OwnServer.__new__(OwnServer)
    own.options = SimpleNamespace(rpc=None)  # type: ignore[assignment]
    own.server = SimpleNamespace(exit_code=lambda: code, end_text=lambda: ENDED)  # type: ignore[assignment]
    own._log = BytesIO(log)
    return own._end_error("", ModelError)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (-6, "  what():  Resource temporarily unavailable"),
        (1, "libgomp: Thread creation failed: Resource temporarily unavailable"),
    ],
)
def test_a_server_that_gets_too_few_threads(code: int, line: str) -> None:
    error = ended(code, NOTE + b"0.0 I loading\n" + line.encode())
    assert isinstance(error, NoProcessError)
    assert error.exit_code == 1
    assert str(error).startswith(f"{ENDED}, as there are no more processes or threads")
    assert str(error).endswith(f"\n  {line}")
    assert "loading" not in str(error)


def test_a_server_that_ends_of_something_else() -> None:
    """Although it went on with fewer threads before."""
    error = ended(1, NOTE + b"0.0 E error: this is no model")
    assert (type(error), error.exit_code) == (ModelError, 2)
    assert type(ended(-6, b"error: what is this")) is PyspacError
