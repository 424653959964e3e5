"""How experts are best copied to a device: in pieces that are each waited for, or many in one go.

    python benchmarks/bench_copies.py                          # the CPU as the device
    python benchmarks/bench_copies.py --device CUDA0 --json -

Each round copies the experts of one layer, as engine/src/cache/slot-copy.cpp does and in other ways,
interleaved. Beside them another stream makes copies of 8 KiB, as the graph does for a layer's ids and rows:
what one of those takes is what copies of experts cost everyone else. On an emulated device
(tools/cuda_emulator) only the costs of calls and of waiting show, no link: a wait takes 50 to 100 us there,
with a driver about 10.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import machine

from pyspac._native import lib_dir
from pyspac.engine.engine import devices, load_backends

KIB: Final = 1 << 10
SMALL_BYTES: Final = 8 * KIB
PART_BYTES: Final = {
    "demo": 36 * KIB,
    "Qwen3-30B-A3B": 900 * KIB,
    "gpt-oss-120b": 4400 * KIB,
}  # three parts each
N_PARTS: Final = 3
TYPE_I8: Final = 24  # GGML_TYPE_I8

Copy = Callable[[], None]


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The few functions of ggml that this needs; pointers are numbers."""

    POINTERS = ("ggml_init", "ggml_new_tensor_1d", "ggml_backend_dev_init", "ggml_backend_dev_buffer_type",
                "ggml_backend_dev_host_buffer_type", "ggml_backend_alloc_ctx_tensors_from_buft",
                "ggml_backend_buft_alloc_buffer", "ggml_backend_buffer_get_base",
                "ggml_backend_cpu_buffer_type")  # fmt: skip

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(str(lib_dir() / "libggml-base.so"))
        for name in self.POINTERS:
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._lib.ggml_init.argtypes = [InitParams]

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._lib, "ggml_" + name)

        def call(*args: Any) -> Any:
            wrapped = [ctypes.c_void_p(a) if isinstance(a, int) and a >= 1 << 32 else a for a in args]
            return function(*wrapped)

        return call


class Link:
    """Host memory, pinned where the device has such, and slots on the device for `n` experts."""

    def __init__(self, ggml: Ggml, device: int, n: int, part_bytes: int) -> None:
        self.ggml, self.n, self.part_bytes = ggml, n, part_bytes
        self.copier, self.graph = ggml.backend_dev_init(device, None), ggml.backend_dev_init(device, None)
        ctx = ggml.init(InitParams(1 << 20, None, True))
        self.slots = ggml.new_tensor_1d(ctx, TYPE_I8, ctypes.c_int64(n * N_PARTS * part_bytes))
        self.small = ggml.new_tensor_1d(ctx, TYPE_I8, ctypes.c_int64(SMALL_BYTES))
        ggml.backend_alloc_ctx_tensors_from_buft(ctx, ggml.backend_dev_buffer_type(device))
        buft = ggml.backend_dev_host_buffer_type(device) or ggml.backend_cpu_buffer_type()
        n_bytes = n * N_PARTS * part_bytes
        self.host = ggml.backend_buffer_get_base(
            ggml.backend_buft_alloc_buffer(buft, ctypes.c_size_t(n_bytes))
        )
        ctypes.memset(self.host, 1, n_bytes)

    def set_async(self, offset: int, n_bytes: int) -> None:
        self.ggml.backend_tensor_set_async(
            self.copier, self.slots, self.host + offset, ctypes.c_size_t(offset), ctypes.c_size_t(n_bytes)
        )

    def wait(self) -> None:
        self.ggml.backend_synchronize(self.copier)

    def copy(self, piece_bytes: int, waits: str) -> None:
        """All experts; `waits`: after each "piece", "expert" or "layer"."""
        for i in range(self.n * N_PARTS):
            for done in range(0, self.part_bytes, piece_bytes):
                self.set_async(i * self.part_bytes + done, min(piece_bytes, self.part_bytes - done))
                if waits == "piece":
                    self.wait()
            if waits == "expert" and i % N_PARTS == N_PARTS - 1:
                self.wait()
        if waits == "layer":
            self.wait()

    def copy_as_engine(self) -> None:
        """A wait after each 512 KiB of an expert, whatever its parts, and after each expert."""
        expert_bytes = N_PARTS * self.part_bytes
        for begin in range(0, self.n * expert_bytes, expert_bytes):
            cuts = {
                *range(0, expert_bytes, 512 * KIB),
                *range(0, expert_bytes, self.part_bytes),
                expert_bytes,
            }
            for done, end in pairwise(sorted(cuts)):
                self.set_async(begin + done, end - done)
                if end % (512 * KIB) == 0:
                    self.wait()
            self.wait()

    def copy_small(self) -> float:
        """What the graph does for each layer; microseconds."""
        t0 = time.perf_counter()
        self.ggml.backend_tensor_set_async(
            self.graph, self.small, self.host, ctypes.c_size_t(0), ctypes.c_size_t(SMALL_BYTES)
        )
        self.ggml.backend_synchronize(self.graph)
        return 1e6 * (time.perf_counter() - t0)


def ways(link: Link) -> dict[str, Copy]:
    return {
        "512 KiB of a part": lambda: link.copy(512 * KIB, "piece"),
        "512 KiB of an expert": link.copy_as_engine,
        "2 MiB of a part": lambda: link.copy(2048 * KIB, "piece"),
        "expert by expert": lambda: link.copy(link.part_bytes, "expert"),
        "layer in one go": lambda: link.copy(link.part_bytes, "layer"),
    }


def measure(link: Link, n_rounds: int, gap_s: float) -> dict[str, dict[str, float]]:
    """GB/s of each way, and what a small copy takes meanwhile; medians of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways(link)}
    small: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(n_rounds):
        for name, copy in ways(link).items():
            thread = threading.Thread(target=copy)
            t0 = time.perf_counter()
            copy()
            times[name].append(time.perf_counter() - t0)
            thread.start()
            while thread.is_alive():
                small[name].append(link.copy_small())
                time.sleep(gap_s)
            thread.join()
    n_bytes = link.n * N_PARTS * link.part_bytes
    return {
        name: {
            "gb_s": n_bytes / median(times[name]) / 1e9,
            "small_us": median(small[name]),
            "small_us_p90": sorted(small[name])[int(0.9 * (len(small[name]) - 1))],
        }
        for name in times
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="CPU", help="ggml's name")
    parser.add_argument("--experts", type=int, default=8, help="of a layer, that are copied")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="-: standard output")
    args = parser.parse_args()
    load_backends()
    device = next((d for d in devices() if d.name.lower() == args.device.lower()), None)
    if device is None:
        sys.exit(f"no device {args.device}: choose one of {', '.join(d.name for d in devices())}")
    ggml = Ggml()
    rows = {
        model: measure(Link(ggml, device.handle, args.experts, part_bytes), args.rounds, 2e-4)
        for model, part_bytes in PART_BYTES.items()
    }
    if args.json:
        result = {
            "device": f"{device.name}: {device.description}",
            "machine": machine.describe(),
            "copies": rows,
        }
        text = json.dumps(result, indent=2)
        print(text) if args.json == "-" else Path(args.json).write_text(text)
        return
    for model, by_way in rows.items():
        print(f"{model}: {args.experts} experts of {N_PARTS} x {PART_BYTES[model] // KIB} KiB")
        for name, row in by_way.items():
            print(f"  {name:26} {row['gb_s']:7.2f} GB/s; a small copy beside it {row['small_us']:7.1f} us, "
                  f"p90 {row['small_us_p90']:7.1f} us")  # fmt: skip


if __name__ == "__main__":
    main()
