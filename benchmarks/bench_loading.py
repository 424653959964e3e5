#!/usr/bin/env python3
"""How long a model takes to load into memory, beside llama.cpp and beside the disk.

Each way is a process of its own, as loading is for its user; they take turns, with the file out of the page
cache (cold) and in it (warm):

    engine   llama-server as `pyspac run --device none` starts it: the engine reads, into huge pages
    loader   the same, and llama.cpp's loader reads: what it was before the engine did
    stock    llama.cpp as it is, with a mapping, and with its own repacked weights where it has them
    disk     the file in order around the page cache, into a buffer that is used again: no memory, no model

Times of the first three are from the start of the process to the first answer of /health. Processor time
is user and system, of all threads.
"""

from __future__ import annotations

import argparse
import http.client
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import machine
import psutil

from pyspac._native import bin_dir
from pyspac.server.arguments import HUGE_PAGES
from tools.served import free_port

PIECE = 1 << 21
DEPTH = 16
WAYS = ("engine", "loader", "stock", "disk")
_COPIED = ("--load-mode", "none", "--device", "none")


def forget(path: Path) -> None:
    """Take the file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_up(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(PIECE):
            pass


def read_disk(path: Path) -> tuple[float, float]:
    """Seconds, and processor seconds."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets, size = count(0, PIECE), path.stat().st_size

    def read() -> None:
        buffer = mmap.mmap(-1, PIECE)
        buffer.madvise(mmap.MADV_HUGEPAGE)  # else the kernel cuts each read into many
        while (offset := next(offsets)) < size:
            os.preadv(fd, [buffer], offset)

    start, cpu = time.perf_counter(), time.process_time()
    threads = [threading.Thread(target=read) for _ in range(DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return time.perf_counter() - start, time.process_time() - cpu


def load(path: Path, arguments: tuple[str, ...], env: Mapping[str, str]) -> tuple[float, float]:
    """Of a llama-server until it answers; seconds, and processor seconds."""
    port = free_port()
    program, context = str(bin_dir() / "llama-server"), ("-c", "512", "-np", "1", "--no-warmup")
    argv = [program, "-m", str(path), "--port", str(port), *context]
    start = time.perf_counter()
    with subprocess.Popen(
        [*argv, *arguments], env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            while not is_ready(port):
                if server.poll() is not None:
                    raise RuntimeError(f"llama-server ended with {server.returncode}")
                time.sleep(0.01)
            times = psutil.Process(server.pid).cpu_times()
            return time.perf_counter() - start, times.user + times.system
        finally:
            server.kill()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def run(way: str, path: Path, threads: int) -> tuple[float, float]:
    if way == "disk":
        return read_disk(path)
    if way == "stock":
        return load(path, ("-t", str(threads), "--device", "none"), {})
    env = {"GLIBC_TUNABLES": HUGE_PAGES}
    if way == "loader":  # the engine is not asked for: the loader reads, and nothing attaches
        return load(path, ("-t", str(threads), *_COPIED, "--no-repack"), env)
    return load(path, ("-t", str(threads), *_COPIED, "--spac-cache", "0"), env | {"PYSPAC_DEVICE": "none"})


def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for i in range(args.rounds):
        for cache in args.cache.split(","):
            for way in args.ways.split(","):
                if way == "disk" and cache == "warm":
                    continue
                warm_up(args.model) if cache == "warm" else forget(args.model)
                seconds, cpu = run(way, args.model, args.threads)
                found.setdefault((cache, way), []).append((seconds, cpu))
                print(f"round {i + 1}: {cache} {way} {seconds:.1f} s, {cpu:.1f} s CPU", file=sys.stderr)
    return [row_of(args.model, cache, way, times) for (cache, way), times in found.items()]


def row_of(path: Path, cache: str, way: str, times: list[tuple[float, float]]) -> dict[str, object]:
    seconds = sorted(wall for wall, _ in times)
    return {
        "bench": "loading", "cache": cache, "way": way, "n_rounds": len(times),
        "s_median": round(statistics.median(seconds), 2), "s_least": round(seconds[0], 2),
        "s_most": round(seconds[-1], 2), "cpu_s": round(statistics.median(cpu for _, cpu in times), 2),
        "gb_s": round(path.stat().st_size / 1e9 / statistics.median(seconds), 2),
    }  # fmt: skip


def print_table(rows: list[dict[str, object]]) -> None:
    print(f"{'':5} {'':7} {'s':>7} {'least..most':>14} {'cpu s':>7} {'GB/s':>6}")
    for row in rows:
        spread = f"{row['s_least']}..{row['s_most']}"
        print(
            f"{row['cache']:5} {row['way']:7} {row['s_median']:>7} {spread:>14} {row['cpu_s']:>7} "
            f"{row['gb_s']:>6}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF, for example of scripts/make_synthetic_gguf.py")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"default: {','.join(WAYS)}")
    parser.add_argument("--cache", default="cold,warm", help="default: cold,warm")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    described = machine.describe()
    rows = measure(args)
    setting = {"model": args.model.name, "model_gb": round(args.model.stat().st_size / 1e9, 2)}
    if args.json:
        for row in rows:
            print(json.dumps(row | setting | {"machine": described}))
    else:
        print(machine.one_line(described))
        print(f"{setting['model']}, {setting['model_gb']} GB")
        print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
