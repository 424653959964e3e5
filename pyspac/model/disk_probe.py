"""How fast a file is read where it lies: a file in, its disk's speed at two depths out.

Random pieces around the page cache, as the memory tier reads experts, one at a time and many at once, into
huge pages, which its pool has as well: into small ones, whose memory is scattered, a virtual disk read less
than half as fast. Nothing is written. It takes about a second.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from pyspac.errors import PyspacError
from pyspac.units import MIB

DEPTH: Final = 32  # as many reads as the engine keeps under way (spac_disk_reader::DEPTH)
N_TURNS: Final = 3  # of both depths: a disk that is fast only for a moment favours neither
BLOCK: Final = 1 << 16  # a multiple of any disk's
_HUGE_PAGE: Final = 2 * MIB
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """Measured; 1e9 bytes per second."""

    path: str
    piece_bytes: int  # of one read
    is_direct: bool  # around the page cache; False: the file system cannot
    depth_1_gb_s: float
    depth_32_gb_s: float
    cpu_s_per_gb: float = 0.0  # of one core, at depth 32: what is computed meanwhile waits so long

    @property
    def slows_under_load(self) -> bool:
        """Whether many reads at once are slower than one: other programs read, or a disk's limit cuts in."""
        return self.depth_1_gb_s > self.depth_32_gb_s

    @property
    def latency_us(self) -> float:
        """What a single read takes beyond its bytes' share of the full speed; 0 if it `slows_under_load`."""
        us = self.piece_bytes / 1e3
        return max(0.0, us / self.depth_1_gb_s - us / self.depth_32_gb_s)

    def read_us(self, n_bytes: float) -> float:
        """Of so many bytes that are asked for at once."""
        return self.latency_us + n_bytes / (self.depth_32_gb_s * 1e3)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self) | {"latency_us": self.latency_us, "slows_under_load": self.slows_under_load}


def measure_disk(path: Path, piece_bytes: int = MIB, seconds: float = 0.5) -> DiskSpeed:
    """Read pieces of that file, so long at each depth, in turns; the medians of the turns.

    Raises PyspacError if it cannot be read.
    """
    with _opened(path, piece_bytes) as (fd, piece, n_pieces, is_direct):
        turns = [
            [_read(fd, piece, n_pieces, depth, seconds / N_TURNS, is_direct) for depth in (1, DEPTH)]
            for _ in range(N_TURNS)
        ]
    _check_read(path, [reads for turn in turns for reads in turn])
    one, many = zip(*turns, strict=True)
    return DiskSpeed(
        path=str(path), piece_bytes=piece, is_direct=is_direct,
        depth_1_gb_s=median(reads.gb_s for reads in one), depth_32_gb_s=median(reads.gb_s for reads in many),
        cpu_s_per_gb=median(reads.cpu_s / reads.gb for reads in many),
    )  # fmt: skip


def measure_in_order(path: Path, piece_bytes: int = MIB, seconds: float = 0.5) -> float:
    """1e9 bytes per second of pieces in the file's order, DEPTH of them at a time.

    Raises PyspacError if it cannot be read.
    """
    with _opened(path, piece_bytes) as (fd, piece, n_pieces, is_direct):
        reads = _read(fd, piece, n_pieces, DEPTH, seconds, is_direct, in_order=True)
    _check_read(path, [reads])
    return reads.gb_s


@contextmanager
def _opened(path: Path, piece_bytes: int) -> Iterator[tuple[int, int, int, bool]]:
    """The file, the bytes of a piece, how many there are, and whether they are read around the page cache."""
    try:
        size = path.stat().st_size
        piece = max(BLOCK, min(piece_bytes, size) // BLOCK * BLOCK)
        fd, is_direct = _open(path, piece)
    except OSError as error:
        raise PyspacError(f"the disk of {path} cannot be measured: {error.strerror}") from error
    try:
        yield fd, piece, max(1, size // piece), is_direct
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _Reads:
    gb: float  # 1e9 bytes; 0: they fail
    s: float
    cpu_s: float  # of this process

    @property
    def gb_s(self) -> float:
        return self.gb / self.s


def _check_read(path: Path, turns: Sequence[_Reads]) -> None:
    if not all(reads.gb for reads in turns):
        raise PyspacError(
            f"the disk of {path} cannot be measured: its reads fail, or the file is empty; "
            "look at the system's log (dmesg)"
        )


def _open(path: Path, piece: int) -> tuple[int, bool]:
    """Some file systems refuse O_DIRECT when a file is opened, others when it is read."""
    if _O_DIRECT:
        try:
            fd = os.open(path, os.O_RDONLY | _O_DIRECT)
        except OSError:
            fd = -1
        if fd >= 0 and _can_read(fd, piece):
            return fd, True
        if fd >= 0:
            os.close(fd)
    return os.open(path, os.O_RDONLY), False


def _can_read(fd: int, piece: int) -> bool:
    try:
        return os.preadv(fd, [mmap.mmap(-1, piece)], 0) > 0
    except OSError:
        return False


def _read(
    fd: int, piece: int, n_pieces: int, depth: int, seconds: float, is_direct: bool, *, in_order: bool = False
) -> _Reads:
    """For so long, `depth` reads at a time, at random places or in order."""
    n_read = [0] * depth
    order = count(Random().randrange(n_pieces))
    memory = _huge_pages(depth * piece)
    begin, cpu_begin = time.monotonic(), time.process_time()

    def read(i: int) -> None:
        rng, buffer = Random(), memory[i * piece : (i + 1) * piece]  # on whole pages, as O_DIRECT wants
        while n_read[i] == 0 or time.monotonic() < begin + seconds:  # once at least: threads may start late
            at = (next(order) % n_pieces if in_order else rng.randrange(n_pieces)) * piece
            if not is_direct:
                os.posix_fadvise(fd, at, piece, os.POSIX_FADV_DONTNEED)
            try:
                n = os.preadv(fd, [buffer], at)
            except OSError:
                return
            if n == 0:
                return  # the file ends before
            n_read[i] += n

    threads = [threading.Thread(target=read, args=(i,)) for i in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _Reads(sum(n_read) / 1e9, time.monotonic() - begin, time.process_time() - cpu_begin)


def _huge_pages(n_bytes: int) -> memoryview:
    """Memory that is there when reads begin, in huge pages where the system gives any."""
    memory = mmap.mmap(-1, n_bytes + 2 * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(len(memory)))
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    return memoryview(memory)[begin : begin + n_bytes]
