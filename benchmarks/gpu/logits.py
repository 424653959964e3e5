"""Do the split's logits agree with stock's as well as stock on the GPU agrees with stock on the CPU?

Four ways to compute the same tokens, in batches of several widths: stock on the CPU, stock on the device,
stock with the experts on the host, and the split with placements that change from step to step. Distances are
relative: |x - y| / |y| per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine import engine as native
from pyspac.engine.devices import Device, cpu_device
from pyspac.engine.step import StepRecord
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import ALL_LAYERS, LOAD_MODE_NONE, Model, ModelParams
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.forward.split import Split
from pyspac.scheduler.config import SchedulerConfig

WIDTHS = (1, 5, 2, 9, 1, 16, 3, 8, 4, 1)
N_PROMPT = 32
FIRST_TOKEN = 300
FACTOR = 2.0  # how much further from the CPU the split may be than stock on the device is
FLOOR = 1e-4  # below this, rounding decides

Logits = NDArray[np.float32]  # [n_tokens, n_vocab]


def load(path: Path, device: Device, experts_on_host: bool) -> Model:
    is_cpu = device.handle is None
    return Model(
        ModelParams(
            path=path,
            n_gpu_layers=0 if is_cpu else ALL_LAYERS,
            devices=() if device.handle is None else (device.handle,),
            buft=native.cpu_buffer_type() if experts_on_host and not is_cpu else None,
            use_extra_bufts=False,
            load_mode=LOAD_MODE_NONE,
        )
    )


def logits_of(model: Model, device: Device, n_threads: int, options: ForwardOptions | None = None) -> Logits:
    """All logits of the steps; with `options`, by the split."""
    n = sum(WIDTHS)
    params = ContextParams(
        n_ctx=512, n_outputs_max=max(WIDTHS), n_threads=n_threads, op_offload=not device.is_cpu
    )
    out: list[Logits] = []
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(Context(model, params))
        split = stack.enter_context(Split(context.ptr, device, options)) if options else None
        tokens = [FIRST_TOKEN + (i * 7) % 150 for i in range(N_PROMPT + n)]
        context.decode(tokens[:N_PROMPT], 1)
        if split:
            split.after_prompt()
        for i, width in enumerate(WIDTHS):
            first = context.n_past
            out.append(context.decode(tokens[first : first + width], width).copy())
            if split:
                split.after_step(StepRecord(step=i, n_draft=width - 1, n_accepted=width - 1, n_tokens=width))
        if split:
            check_that_both_sides_worked(split)
    return np.concatenate(out)


def check_that_both_sides_worked(split: Split) -> None:
    counters = split.engine.board.counters[0]
    if not counters["n_hit"] or not counters["n_miss"]:
        raise RuntimeError(
            f"the split used one side only: {int(counters['n_hit'])} hits, {int(counters['n_miss'])} misses"
        )


def distance(x: Logits, y: Logits) -> tuple[float, float]:
    """|x - y| / |y| that half of the tokens, and nine in ten, stay below.

    Not the largest: where two experts are nearly tied, rounding chooses another one, and a single token is
    far off, in stock as well.
    """
    values = np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)
    return float(np.median(values)), float(np.quantile(values, 0.9))


def compare(path: Path, device: Device, n_threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the row of this test; `ok` is its verdict."""
    host = cpu_device()
    with load(path, host, False) as model:
        cpu = logits_of(model, host, n_threads)
    with load(path, device, False) as model:
        stock = logits_of(model, device, n_threads)
    split: dict[str, Logits] = {}
    with load(path, device, True) as model:
        mixed = logits_of(model, device, n_threads)
        for cache in ("17%", "60%"):
            options = ForwardOptions(
                model=path,
                cache=CacheSize(text=cache),
                n_threads=n_threads,
                device=device.name,
                width=max(WIDTHS),
                scheduler=SchedulerConfig(n_draft_max=max(WIDTHS) - 1),
            )
            split[cache] = logits_of(model, device, n_threads, options)
    distances = {
        "stock device - stock cpu": distance(stock, cpu),
        "stock, experts on host - stock cpu": distance(mixed, cpu),
    }
    for cache, logits in split.items():
        distances[f"split {cache} - stock cpu"] = distance(logits, cpu)
        distances[f"split {cache} - stock device"] = distance(logits, stock)
    for name, (middle, most) in distances.items():
        say(f"{name:36} median {middle:.2e}  90 % {most:.2e}")
    return verdict(distances)


def verdict(distances: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The split may be FACTOR times as far as stock on the device is, by both measures."""
    bound = [max(FLOOR, FACTOR * value) for value in distances["stock device - stock cpu"]]
    bad = [
        name
        for name, values in distances.items()
        if name.startswith("split")
        and any(not v <= b for v, b in zip(values, bound, strict=True))  # NaN is bad
    ]
    return {"row": "logits", "ok": not bad, "bad": bad, "bound": bound, "distances": distances}
