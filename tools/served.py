"""Running servers, for the tests and the soak: `pyspac serve` with its children, and llama-server by itself.

Every process is started with its own arguments and ended by its own id; nothing listens beyond 127.0.0.1.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from pyspac.server.health import is_healthy

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "pyspac" / "models" / "demo-moe.gguf"
DRAFT = ROOT / "pyspac" / "models" / "demo-draft.gguf"
HOST = "127.0.0.1"
JSON_HEADER = {"Content-Type": "application/json"}  # without it a body is refused
# two threads that spin for each other on a busy machine are fifty times as slow
ONE_THREAD = ("-t", "1", "-td", "1")
START_S = 60.0  # machines that run tests are often busy
END_S = 60.0  # 20 s for answers under way, and 20 s until a server that hangs is killed


class ServedError(RuntimeError):
    """A server that did not do what it had to, or not in time."""


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = START_S) -> Any:
    """The first true value of `condition`. Raises ServedError after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise ServedError(f"waited {timeout_s:.0f} s for {what}")


def free_port() -> int:
    """A port that was free a moment ago; where there are such, none that Linux gives to connections."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    fixed = range(max(1024, first // 2), first)  # those below are root's
    for port in (*(secrets.choice(fixed) for _ in range(100 if fixed else 0)), 0):
        try:
            with closing(socket.create_server((HOST, port))) as listener:
                return int(listener.getsockname()[1])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ServedError(f"no free port on {HOST}")


def environment(cache_dir: Path) -> dict[str, str]:
    """For pyspac as a program: nothing of the user's cache is read or written."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYSPAC_CACHE_DIR": str(cache_dir), "PYTHONPATH": path}


def run_pyspac(
    *arguments: str, cache_dir: Path, timeout_s: float = 60.0, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "pyspac", *arguments],
        env={**environment(cache_dir), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


class Serve:
    """One `pyspac serve`, its log as a list of JSON objects, its children by their ids."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        passed: Sequence[str] = ("-np", "2", *ONE_THREAD),
        draft: bool = True,
        target: bool = True,  # False: `passed` names a model
        pair: tuple[Path, Path] = (TARGET, DRAFT),
        device: str = "emulated",
        variables: Mapping[str, str] | None = None,
        within: Sequence[str] = (),  # a program that becomes the one behind it
    ) -> None:
        models = [*(["-m", str(pair[0])] if target else []), *(["-md", str(pair[1])] if draft else [])]
        argv = [sys.executable, "-m", "pyspac", "serve", *models, "--device", device, "--log-json"]
        cache = [] if "--cache" in arguments or device in ("none", "auto") else ["--cache", "25%"]
        # drafts the same in every run
        fixed = ["--speculation", "static"] if draft and "--speculation" not in arguments else []
        port = [] if "--port" in arguments else ["--port", str(free_port())]
        self.stderr_path = folder / f"serve-{time.monotonic_ns()}.log"
        self.events: list[dict[str, Any]] = []
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*within, *argv, *cache, *port, *fixed, *arguments, "--", *passed],
                env={**environment(folder / "cache"), **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def event(self, name: str, n: int = 0) -> dict[str, Any] | None:
        """The n-th event of this name so far."""
        found = [event for event in self.events if event.get("event") == name]
        return found[n] if len(found) > n else None

    def wait_ready(self, n: int = 0, *, scheduler: bool = True) -> Self:
        """Until the server answers and its scheduler has decided, if it has one."""
        wait_for("the server", lambda: self.event("ready", n) or self.check_alive())
        if not scheduler:
            return self
        wait_for("the scheduler", lambda: self.event("attached", n) or self.check_alive())
        return self

    def check_alive(self) -> None:
        """Raise ServedError with its log if it has ended."""
        if self.process.poll() is not None:
            raise ServedError(f"pyspac serve exited with {self.process.returncode}:\n{self.log()[-3000:]}")

    def log(self) -> str:
        """llama-server's log and pyspac's errors."""
        return self.stderr_path.read_text(errors="replace")

    def _last(self, name: str, field: str) -> Any:
        return [event for event in self.events if event.get("event") == name][-1][field]

    @property
    def url(self) -> str:
        return str(self._last("ready", "url"))

    @property
    def board(self) -> str:
        return str(self._last("ready", "board"))

    @property
    def server_pid(self) -> int:
        return int(self._last("ready", "server_pid"))

    @property
    def scheduler_pid(self) -> int:
        return int(self._last("scheduler_started", "pid"))

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait(self, timeout_s: float = END_S) -> int:
        """Its exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServedError(
                f"pyspac serve did not end within {timeout_s:.0f} s:\n{self.log()[-3000:]}"
            ) from None
        self._reader.join(5)
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal; its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Whatever the test did, nothing of it stays."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def llama_server(
    bin_dir: Path, folder: Path, *arguments: str, draft: bool = True, target: Path = TARGET
) -> Iterator[int]:
    """llama-server itself, with the emulated device where an engine is asked for; yields its port."""
    port = free_port()
    argv = [str(bin_dir / "llama-server"), "-m", str(target), "--host", HOST, "--port", str(port)]
    if draft:
        argv += ["-md", str(DRAFT), "--spec-type", "draft-simple"]
    log_path = folder / f"llama-server-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*argv, "--device", "none", *arguments],
            env={**os.environ, "PYSPAC_DEVICE": "emulated"}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_for("llama-server", lambda: is_healthy(HOST, port) or process.poll() is not None)
        if process.poll() is not None:
            raise ServedError(f"llama-server did not start:\n{log_path.read_text(errors='replace')[-3000:]}")
        yield port
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def post(port: int, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Any:
    """A request to llama-server's own API."""
    url = f"http://{HOST}:{port}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), JSON_HEADER)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def complete(port: int, n_predict: int, prompt: str = "def parse(self, text):\n") -> dict[str, Any]:
    """A greedy answer of so many tokens."""
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True}
    return dict(post(port, "/completion", body))
