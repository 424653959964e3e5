"""What a fault is, and what it works on."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import psutil

from tools.soak.asker import Asker
from tools.soak.questions import Answer, Question
from tools.soak.tally import Tally
from tools.system_faults import SystemFaults

HTTP_S: Final = 180.0


class FaultError(Exception):
    """The server did not stand a fault as it should."""


class Served(Protocol):
    """What faults need of `tools.served.Serve`."""

    @property
    def url(self) -> str: ...
    @property
    def board(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def server_pid(self) -> int: ...
    @property
    def scheduler_pid(self) -> int: ...


@dataclass(slots=True)
class Site:
    """What faults work on."""

    serve: Served
    model: Path
    board_path: Path
    asker: Asker
    references: dict[Question, Answer]
    tally: Tally
    n_slots: int
    slots_folder: Path  # --slot-save-path
    shm_folder: Path | None = None  # a /dev/shm of our own; None: it is everybody's
    disk_folder: Path | None = None  # a small file system with cache and saved slots; None: there is none
    system: SystemFaults | None = None  # of the server's process; None: it has none
    stop: threading.Event = field(default_factory=threading.Event)  # set: end soon
    n_full_disks: int = 0  # begun so far, and
    is_disk_full: bool = False  # now

    def wait(self, seconds: float) -> None:
        """So long, or until the soak ends."""
        self.stop.wait(seconds)

    def scheduler(self) -> psutil.Process | None:
        """The scheduler's process; None if it is not running now."""
        with contextlib.suppress(psutil.Error, IndexError):
            process = psutil.Process(self.serve.scheduler_pid)
            return process if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else None
        return None

    def post(self, path: str, body: Any) -> Any:
        """POST to llama-server's own API. Raises FaultError with its answer if it refuses."""
        request = urllib.request.Request(
            f"{self.serve.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=HTTP_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise FaultError(f"POST {path} {body}: {error.code} {text[:300]}") from error
        except OSError as error:
            raise FaultError(f"POST {path} {body}: {error}") from error


class Fault:
    """One kind of fault; name and one line for --help are the class's."""

    name: ClassVar[str]
    what: ClassVar[str]
    resource: ClassVar[str]

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.rng = random.Random(f"{seed}-{self.name}")

    def why_not(self) -> str | None:
        """Why this machine does not allow it; None: it does."""
        return None

    def apply(self) -> bool:
        """Whether there was anything to do. Raises FaultError."""
        raise NotImplementedError
