"""The faults of the soak, each a class: what it does to a running server, and what must hold meanwhile.

A fault is applied by `apply`, which returns whether there was anything to do and raises FaultError where the
server did not stand it as promised. Faults with the same `resource` never overlap; others do.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import psutil
from served import ServedError, run_pyspac, wait_for
from soak_clients import Answer, Asker, Question, Tally, adapter_scales, ask_and_compare, text_of

from pyspac.server.backoff import LONG_LIFE_S

REPAIR_S: Final = 10.0  # for the engine to mend its board; a full /dev/shm may be in its way
TWIN_S: Final = 120.0  # for a start that is refused, on a busy machine
HTTP_S: Final = 180.0
SPARED: Final = 0.8  # of the young schedulers
CHUNK: Final = 1 << 20  # a full file system is filled by so many bytes at a time


class FaultError(Exception):
    """The server did not stand a fault as it should."""


class Served(Protocol):
    """What faults need of `served.Serve`."""

    url: str
    board: str
    port: int
    server_pid: int
    scheduler_pid: int


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


# ---- the scheduler -------------------------------------------------------------------------------


class Kill(Fault):
    name, resource = "kill", "scheduler"
    what = "kills the scheduler (SIGKILL)"

    def apply(self) -> bool:
        scheduler = self.site.scheduler()
        if scheduler is None or self._spares(scheduler):
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            scheduler.kill()
        return True

    def _spares(self, scheduler: psutil.Process) -> bool:
        """Mostly a young one: back-off would leave no scheduler for the other faults."""
        try:
            age_s = time.time() - scheduler.create_time()
        except psutil.NoSuchProcess:
            return True
        return age_s < LONG_LIFE_S and self.rng.random() < SPARED


class Stop(Fault):
    name, resource = "stop", "scheduler"
    what = "stops the scheduler for a while (SIGSTOP, SIGCONT)"

    def apply(self) -> bool:
        scheduler = self.site.scheduler()
        if scheduler is None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            scheduler.send_signal(signal.SIGSTOP)
            try:
                self.site.wait(self.rng.uniform(0.3, 3))
            finally:
                scheduler.send_signal(signal.SIGCONT)
        return True


# ---- the board -----------------------------------------------------------------------------------

# values that break code which trusts them: the ends of the ranges, signs, and each state of an expert
EDGES: Final = bytes([0x00, 0x01, 0x02, 0x03, 0x04, 0x7F, 0x80, 0xFE, 0xFF])


def nonsense(rng: random.Random, n: int) -> bytes:
    """Random bytes, one value all over, or random edges."""
    match rng.randrange(3):
        case 0:
            return rng.randbytes(n)
        case 1:
            return bytes([rng.choice(EDGES)]) * n
    return bytes(rng.choices(EDGES, k=n))


def truncated_size(rng: random.Random, size: int) -> int:
    """Nothing, next to nothing, odd sizes, and ends of pages; less than `size`."""
    sizes = (0, 0, 1, 63, 4095, 4096, 4097, rng.randrange(size), size // 2 | 1, size - 1)
    return min(rng.choice(sizes), size - 1)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """A descriptor for reading and writing; None if there is no such file."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


class Scribble(Fault):
    name, resource = "scribble", "board"
    what = "writes nonsense all over the board, then puts back what was there"

    def apply(self) -> bool:
        with opened(self.site.board_path) as fd:
            if fd is None:
                return False
            content = os.pread(fd, 1 << 28, 0)
            end_s = time.monotonic() + self.rng.uniform(0.2, 1.5)
            try:
                while time.monotonic() < end_s and not self.site.stop.is_set():
                    self._write(fd, len(content))
                    time.sleep(0.001)
            finally:
                self._put_back(fd, content)  # nobody else knows the header, and a new scheduler needs it
        return True

    def _write(self, fd: int, size: int) -> None:
        n = min(size, self.rng.choice((1, 8, 64, 4096, size)))
        with contextlib.suppress(OSError):  # no room to grow again into: /dev/shm is full
            os.pwrite(fd, nonsense(self.rng, n), self.rng.randrange(size - n + 1))

    def _put_back(self, fd: int, content: bytes) -> None:
        end_s = time.monotonic() + REPAIR_S
        while True:
            try:
                os.pwrite(fd, content, 0)
                return
            except OSError as error:
                if time.monotonic() > end_s:
                    raise FaultError(f"the board could not be put back: {error}") from error
                time.sleep(0.1)


class Truncate(Fault):
    name, resource = "truncate", "board"
    what = "cuts the board's file to nothing and to odd sizes; the engine must mend it"

    def __init__(self, site: Site, seed: int) -> None:
        super().__init__(site, seed)
        self.size: int | None = None  # of the whole board

    def apply(self) -> bool:
        with opened(self.site.board_path) as fd:
            if fd is None:
                return False
            if self.size is None:
                self.size = os.fstat(fd).st_size
            for _ in range(self.rng.randint(1, 6)):
                os.ftruncate(fd, truncated_size(self.rng, self.size))
                time.sleep(self.rng.choice((0, 0.001, 0.01, 0.05)))
            self._wait_until_mended(fd)
        return True

    def _wait_until_mended(self, fd: int) -> None:
        size = self.size
        try:
            wait_for("the board", lambda: os.fstat(fd).st_size == size, REPAIR_S)
        except ServedError as error:
            raise FaultError(
                f"the board still has {os.fstat(fd).st_size} of {size} bytes after {REPAIR_S:.0f} s"
            ) from error


class Remove(Fault):
    name, resource = "remove", "board"
    what = "unlinks the board for a while; for good at the end of the soak"

    def apply(self) -> bool:
        path = self.site.board_path
        kept = path.with_name(f"soak-kept-{os.getpid()}")
        try:
            os.link(path, kept)
        except FileNotFoundError:
            return False
        path.unlink()
        try:
            self.site.wait(self.rng.uniform(0.2, 4))
        finally:
            self._put_back(kept, path)
        return True

    def _put_back(self, kept: Path, path: Path) -> None:
        try:
            os.link(kept, path)
        except FileExistsError as error:
            raise FaultError(f"{path} was made again by somebody while it was removed") from error
        finally:
            kept.unlink()

    def for_good(self) -> None:
        """And the scheduler with it: none can come back."""
        self.site.board_path.unlink(missing_ok=True)
        scheduler = self.site.scheduler()
        if scheduler is not None:
            scheduler.kill()


class Twin(Fault):
    name, resource = "twin", "board"
    what = "starts a second server with the same board or port, which must be refused with exit code 2"

    def apply(self) -> bool:
        path, serve = self.site.board_path, self.site.serve
        if not path.exists():
            return False
        inode = path.stat().st_ino
        option, value = self.rng.choice((("--board", serve.board), ("--port", str(serve.port))))
        try:
            done = run_pyspac(
                "serve", "-m", str(self.site.model), "--device", "cpu", "--cache", "25%", option, value,
                cache_dir=self.site.slots_folder.parent, timeout_s=TWIN_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise FaultError(f"a second server with {option} {value} was not refused: it ran") from error
        if done.returncode != 2 or "in use" not in done.stderr:
            raise FaultError(
                f"a second server with {option} {value} ended with {done.returncode}: {done.stderr[-300:]}"
            )
        if not path.exists() or path.stat().st_ino != inode:
            raise FaultError(f"a second server with {option} {value} took the board of the first")
        return True


# ---- clients, slots, adapters --------------------------------------------------------------------


class Disconnect(Fault):
    name, resource = "disconnect", "client"
    what = "cuts clients off in mid-answer, streamed and not"

    def apply(self) -> bool:
        for _ in range(self.rng.randint(1, 4)):
            question = self.rng.choice(list(self.site.references))
            self.site.tally.asked()
            if self.rng.random() < 0.3:
                self._give_up(question)
            else:
                self._cut_stream(question)
        return True

    def _give_up(self, question: Question) -> None:
        """A whole answer that nobody waits for."""
        with contextlib.suppress(Exception):  # the timeout; or it was quicker
            self.site.asker.open(question, timeout=self.rng.uniform(0.001, 0.1))
        self.site.tally.cut()

    def _cut_stream(self, question: Question) -> None:
        expected, text = self.site.references[question].text, ""
        try:
            with self.site.asker.open(question, stream=True) as stream:
                for n_left, chunk in zip(range(self.rng.randint(0, 6), -1, -1), stream, strict=False):
                    text += text_of(chunk)
                    if n_left == 0:
                        break
        except Exception as error:  # whatever the client raises
            self.site.tally.lost(f"{question.prompt!r}, to be cut off: {type(error).__name__}: {error}")
            return
        if expected.startswith(text):
            self.site.tally.cut()
        else:
            self.site.tally.different(f"{question.prompt!r}, cut off: {text!r}, not {expected!r}")


class Slots(Fault):
    """Of requests without adapters: a saved slot does not say under which one it was computed."""

    name, resource = "slots", "slots"
    what = "saves, restores and erases server slots"

    def apply(self) -> bool:
        for _ in range(self.rng.randint(1, 4)):
            self._act()
        return True

    def _act(self) -> None:
        slot = self.rng.randrange(self.site.n_slots - 1)
        saved = sorted(self.site.slots_folder.glob("slot-?"))  # each with a .dft of the draft model beside it
        action = self.rng.choice(("save", "save", "restore", "restore", "erase"))
        if action == "restore" and not saved:
            action = "save"
        name = self.rng.choice(saved).name if action == "restore" else f"slot-{self.rng.randrange(8)}"
        n_full = self.site.n_full_disks
        try:
            self.site.post(f"/slots/{slot}?action={action}", {"filename": name})
        except FaultError:
            if not self._was_full(n_full):
                raise
        if action == "save" and self._was_full(n_full):  # perhaps half of it
            (self.site.slots_folder / name).unlink(missing_ok=True)

    def _was_full(self, n_before: int) -> bool:
        return self.site.is_disk_full or self.site.n_full_disks != n_before


class Adapters(Fault):
    name, resource = "adapters", "adapters"
    what = "swaps the server's LoRA adapters, asks under each, and swaps back"

    def apply(self) -> bool:
        questions = [q for q in self.site.references if q.adapter is not None]
        for question in self.rng.sample(questions, 2):
            self._set(question.adapter)
            try:
                # llama-server keeps what it computed under other adapters if no request names any
                ask_and_compare(
                    self.site.asker, question, self.site.references[question], self.site.tally,
                    is_streamed=self.rng.random() < 0.5, names_adapter=False,
                    extra_body={"cache_prompt": False},
                )  # fmt: skip
            finally:
                self._set(None)
        return True

    def _set(self, adapter: int | None) -> None:
        self.site.post("/lora-adapters", adapter_scales(adapter, self.site.asker.n_adapters))


# ---- full file systems ---------------------------------------------------------------------------


def fill(path: Path) -> None:
    """Grow a file until its file system is full."""
    chunk = bytes(CHUNK)
    with path.open("wb", buffering=0) as file:
        while chunk:
            try:
                file.write(chunk)
            except OSError:
                chunk = chunk[: len(chunk) // 2]  # to the last byte


class Full(Fault):
    """Only of file systems of our own: another's may be anything."""

    def folder(self) -> Path | None:
        raise NotImplementedError

    def why_not(self) -> str | None:
        return (
            None
            if self.folder()
            else "no small file system of its own (mount namespaces are not allowed here)"
        )

    def apply(self) -> bool:
        folder = self.folder()
        assert folder is not None
        filler = folder / f"soak-filler-{os.getpid()}"
        try:
            fill(filler)
            self.site.wait(self.rng.uniform(0.3, 3))
        finally:
            filler.unlink(missing_ok=True)
        return True


class FullShm(Full):
    name, resource = "shm-full", "shm"
    what = "fills /dev/shm for a while"

    def folder(self) -> Path | None:
        return self.site.shm_folder


class FullDisk(Full):
    name, resource = "disk-full", "disk"
    what = "fills the disk with saved slots and learned utilities for a while"

    def folder(self) -> Path | None:
        return self.site.disk_folder

    def apply(self) -> bool:
        self.site.n_full_disks += 1
        self.site.is_disk_full = True
        try:
            return super().apply()
        finally:
            self.site.is_disk_full = False


FAULTS: Final[tuple[type[Fault], ...]] = (
    Kill, Stop, Scribble, Truncate, Remove, Twin, Disconnect, Slots, Adapters, FullShm, FullDisk,
)  # fmt: skip


# ---- applying them -------------------------------------------------------------------------------


@dataclass(slots=True)
class FaultCount:
    """What came of one kind of fault."""

    n_applied: int = 0
    n_idle: int = 0  # there was nothing to do
    n_failed: int = 0
    skipped: str | None = None  # why it is not applied at all


class FaultDealer:
    """Threads that apply faults at random times; each comes once before any comes again."""

    def __init__(
        self, faults: list[Fault], stop: threading.Event, *, n: int, pause_s: float, seed: int
    ) -> None:
        """`n` threads, pauses of `pause_s` on average."""
        self.counts = {fault.name: FaultCount(skipped=fault.why_not()) for fault in faults}
        self.failures: list[str] = []
        self._faults = [fault for fault in faults if not self.counts[fault.name].skipped]
        self._resources = {fault.resource: threading.Lock() for fault in faults}
        self._rng = random.Random(f"{seed}-dealer")
        self._deck: list[Fault] = []
        self._lock = threading.Lock()
        self._stop = stop
        self._pause_s = pause_s
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(n)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """After the event was set: until the last fault is over."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() and self._faults:
            with self._lock:
                pause_s = self._rng.expovariate(1 / self._pause_s)
            self._stop.wait(pause_s)
            fault = self._deal()
            if fault is not None and not self._stop.is_set():
                with self._releasing(fault):
                    self.apply(fault)

    @contextlib.contextmanager
    def _releasing(self, fault: Fault) -> Iterator[None]:
        try:
            yield
        finally:
            self._resources[fault.resource].release()

    def _deal(self) -> Fault | None:
        """The next of the deck whose resource is free, which is then taken; None: all wait."""
        with self._lock:
            if not self._deck:
                self._deck = self._rng.sample(self._faults, len(self._faults))
            for fault in self._deck:
                if self._resources[fault.resource].acquire(blocking=False):
                    self._deck.remove(fault)
                    return fault
        return None

    def apply(self, fault: Fault) -> None:
        """Apply one, and book what came."""
        count = self.counts[fault.name]
        try:
            if fault.apply():
                count.n_applied += 1
            else:
                count.n_idle += 1
        except Exception as error:  # of ours as well: a fault that breaks must not end the soak unseen
            count.n_failed += 1
            text = str(error) if isinstance(error, FaultError) else f"{type(error).__name__}: {error}"
            self.failures.append(f"{fault.name}: {text}")


def make_faults(names: list[str], site: Site, seed: int) -> list[Fault]:
    """Those of the names, in FAULTS' order."""
    return [kind(site, seed) for kind in FAULTS if kind.name in names]
