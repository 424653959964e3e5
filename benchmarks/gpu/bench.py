"""What all visits share: models by placement of their experts, contexts, threads, the reference text."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from arms import chosen_arms, device_layers, host_pattern
from replay import endless
from settings import Settings

from pyspac.engine import engine as native
from pyspac.engine.devices import Device, choose_device
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import ALL_LAYERS, LOAD_MODE_AUTO, LOAD_MODE_NONE, Model, ModelParams
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import read_header

N_PROMPT = 48
FIRST_TOKEN = 300  # of the prompt: the synthetic vocabulary's words begin at 259


@dataclass(slots=True)
class Bench:
    """What all visits share."""

    s: Settings
    path: Path
    geometry: MoeGeometry
    device: Device
    cache_bytes: int
    n_threads: int = 1
    models: dict[str, Model] = field(default_factory=dict)
    on_device: list[int] = field(
        default_factory=list
    )  # layers of --n-cpu-moe whose experts are on the device
    reference: list[int] = field(default_factory=list)  # prompt and plain greedy continuation

    @property
    def n_predict(self) -> int:
        return self.s.warm_up + self.s.tokens

    @property
    def n_ctx(self) -> int:
        return -(-(N_PROMPT + self.n_predict + self.s.draft_max + 2) // 256) * 256

    def prompt(self) -> list[int]:
        return list(range(FIRST_TOKEN, FIRST_TOKEN + N_PROMPT))


# ---- models and contexts -------------------------------------------------------------------------


def open_bench(s: Settings, path: Path, stack: contextlib.ExitStack, say: Callable[[str], None]) -> Bench:
    """Load the model with all experts on the host, and choose the layers of --n-cpu-moe."""
    geometry = read_geometry(read_header(path))
    device = choose_device(s.device, s.rpc)
    options = chosen_arms(s)[0].options(path, s)
    cache_bytes = options.cache.n_bytes(geometry.experts_bytes)
    if cache_bytes is None:
        raise ValueError("--cache auto: name a share or MiB, so that all contenders get the same")
    bench = Bench(s, path, geometry, device, cache_bytes)
    bench.on_device = device_layers(geometry, cache_bytes)
    bench.models["host"] = stack.enter_context(load(bench, [], say))
    return bench


def load(bench: Bench, on_device: list[int], say: Callable[[str], None]) -> Model:
    """As pyspac and llama.cpp's --cpu-moe load it: read into memory, pinned where the device can."""
    start = time.monotonic()
    is_cpu = bench.device.handle is None
    params = ModelParams(
        path=bench.path,
        n_gpu_layers=0 if is_cpu else ALL_LAYERS,
        devices=() if bench.device.handle is None else (bench.device.handle,),
        buft=None if is_cpu else native.cpu_buffer_type(),
        buft_tensors=host_pattern(bench.geometry, on_device),
        use_extra_bufts=False,
        load_mode=LOAD_MODE_AUTO if is_cpu else LOAD_MODE_NONE,
    )
    model = Model(params)
    say(f"model loaded, experts of {len(on_device)} layers on the device ({time.monotonic() - start:.1f} s)")
    return model


def new_context(bench: Bench, placement: str) -> Context:
    n_draft = bench.s.draft_max
    return Context(
        bench.models[placement],
        ContextParams(
            n_ctx=bench.n_ctx,
            n_outputs_max=1 + n_draft,
            n_rollback_max=n_draft,
            n_threads=bench.n_threads,
            op_offload=not bench.device.is_cpu,
        ),
    )


def compute_reference(bench: Bench) -> list[int]:
    """Prompt and its plain greedy continuation by stock, long enough for every draft."""
    with new_context(bench, "host") as context:
        return endless(context, bench.prompt(), bench.n_predict + bench.s.draft_max)


def choose_threads(bench: Bench, say: Callable[[str], None]) -> int:
    """Physical cores or all that may be used: what is faster for stock; both get it."""
    usable = len(psutil.Process().cpu_affinity())
    counts = sorted({min(usable, psutil.cpu_count(logical=False) or usable), usable})
    if bench.s.threads or len(counts) == 1:
        return bench.s.threads or counts[0]
    seconds = {n: time_of_stock(bench, n) for n in counts}
    say("threads: " + ", ".join(f"{n} take {s * 1e3:.1f} ms per step" for n, s in seconds.items()))
    return min(counts, key=lambda n: seconds[n])


def time_of_stock(bench: Bench, n_threads: int, n_steps: int = 12) -> float:
    """Seconds per step of stock, one and five tokens wide in turns."""
    bench.n_threads = n_threads
    with new_context(bench, "host") as context:
        tokens = bench.prompt()
        context.decode(tokens, 1)
        width = min(5, bench.s.draft_max + 1)
        for step in range(n_steps):
            if step == 2:
                start = time.perf_counter()
            context.decode(tokens[: width if step % 2 else 1], 1)
        return (time.perf_counter() - start) / (n_steps - 2)


def say(text: str) -> None:
    print(f"    {text}", flush=True)
