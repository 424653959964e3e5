"""Faults of the board's file."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.served import ServedError, run_pyspac, wait_for
from tools.soak.faults.fault import Fault, FaultError, Site

REPAIR_S: Final = 10.0  # for the engine to mend its board; a full /dev/shm may be in its way
TWIN_S: Final = 120.0  # for a start that is refused, on a busy machine
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
                self._put_back(fd, content)  # no other process knows the header, and a new scheduler needs it
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
            raise FaultError(
                f"a second server with {option} {value} was not refused within {TWIN_S:.0f} s"
            ) from error
        if done.returncode != 2 or "in use" not in done.stderr:
            raise FaultError(
                f"a second server with {option} {value} ended with {done.returncode}: {done.stderr[-300:]}"
            )
        if not path.exists() or path.stat().st_ino != inode:
            raise FaultError(f"a second server with {option} {value} took the board of the first")
        return True
