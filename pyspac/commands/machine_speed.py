"""What predictions of speed rest on: types of weights in, this machine's memory, kernels and disk out."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Final

import psutil

from pyspac.errors import PyspacError
from pyspac.model.disk_probe import DiskSpeed, measure_disk
from pyspac.model.speed_forecast import N_TEXT, WIDTHS, KernelSpeed, Machine
from pyspac.talk.remover import removed_if_killed
from pyspac.units import MIB

TYPES: Final = ("Q4_K", "Q6_K", "Q8_0", "Q5_0", "MXFP4")  # of the usual quantisations
PIECE_BYTES: Final = MIB  # about a matrix of an expert
N_TURNS: Final = 5
_PROBE_BYTES: Final = 256 * MIB


def measure(
    n_threads: int,
    ram_bytes: int,
    vram_bytes: int = 0,
    model: Path | None = None,
    types: Iterable[str] = TYPES,
    piece_bytes: int = PIECE_BYTES,
    *,
    has_prompts: bool = True,
) -> Machine:
    """The disk is that of `model`, or of the folder for temporary files. Raises PyspacError.

    Each speed is a median of turns, as other programs and virtual machines take their share; `varied` says
    how far the slowest and the fastest turn of decoding went from it, `others_share` what they took. Not
    `has_prompts`: only decoding.
    """
    from pyspac.engine.engine import (  # the native library
        has_kernels,
        measure_attention_gop_s,
        measure_host_gb_s,
        measure_kernel_gb_s,
        tokens_per_expert,
    )

    names = [name for name in types if has_kernels(name)]
    widths, attended = (WIDTHS, (1, N_TEXT)) if has_prompts else (WIDTHS[:1], (1,))

    def turn() -> list[list[float]]:
        attention = [measure_attention_gop_s(n, n_threads) for n in attended]
        kernels = [[measure_kernel_gb_s(name, n, n_threads) for n in widths] for name in names]
        return [[measure_host_gb_s(n_threads)], attention, *kernels]

    began, others_s = time.perf_counter(), _others_s()
    turns = [turn() for _ in range(N_TURNS)]
    others = (_others_s() - others_s) / (time.perf_counter() - began)
    found = [[median(x) for x in zip(*each, strict=True)] for each in zip(*turns, strict=True)]
    memory, attention, *kernels = found
    shares = [median(a[0] / b[0] for a, b in zip(one, found, strict=True)) for one in turns]
    return Machine(
        ram_bytes=ram_bytes, vram_bytes=vram_bytes, n_threads=n_threads, memory_gb_s=memory[0],
        kernels={name: KernelSpeed(tuple(gb_s)) for name, gb_s in zip(names, kernels, strict=True)},
        attention_gop_s=tuple(attention), per_expert=tokens_per_expert(), varied=(min(shares), max(shares)),
        others_share=max(0.0, others + n_threads - (psutil.cpu_count() or n_threads)) / n_threads,
        disk=measure_disk(model, piece_bytes) if model else _on_probe(lambda p: measure_disk(p, piece_bytes)),
    )  # fmt: skip


def _others_s() -> float:
    """Seconds of all cores that were not this process's, since the machine's start."""
    spent: dict[str, float] = psutil.cpu_times()._asdict()
    idle = ("idle", "iowait", "guest", "guest_nice")  # user and nice hold the guests' time, too
    return sum(s for name, s in spent.items() if name not in idle) - time.process_time()


def _on_probe(measured: Callable[[Path], DiskSpeed]) -> DiskSpeed:
    """On a file that is written for it, where models that are fetched lie, else where temporary files do."""
    folder = Path.home() / ".cache"
    try:
        folder = folder if folder.is_dir() and os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
        if shutil.disk_usage(folder).free < 2 * _PROBE_BYTES:
            raise PyspacError(f"{folder} has no room for the {_PROBE_BYTES // MIB} MiB that measure its disk")
        with (
            tempfile.NamedTemporaryFile(dir=folder, prefix="pyspac-fit-") as file,
            removed_if_killed([Path(file.name)]),
        ):
            block = bytes(range(256)) * (MIB // 256)
            for _ in range(_PROBE_BYTES // MIB):
                file.write(block)
            file.flush()
            return measured(Path(file.name))
    except OSError as error:
        raise PyspacError(
            f"the disk of {folder} cannot be measured: {error.strerror}; make room there"
        ) from error
