"""Phase `compare`: the contenders in turns, at equal device memory for experts; one JSON row each.

A model is loaded once per placement of its experts. A visit of a contender opens a context (and attaches an
engine), generates warm-up and measured tokens after the same prompt, and closes it again. Round by round the
order rotates.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from arms import BASELINE, Arm, chosen_arms, device_layers, host_pattern
from replay import EndlessSampler, ReplayDrafter, ReplaySampler
from settings import Settings

from pyspac.engine import engine as native
from pyspac.engine.devices import Device, choose_device
from pyspac.engine.step import StepRecord
from pyspac.generate.decode import DecodeLoop
from pyspac.generate.llama import (
    ALL_LAYERS,
    LOAD_MODE_AUTO,
    LOAD_MODE_NONE,
    Context,
    ContextParams,
    Model,
    ModelParams,
)
from pyspac.generate.split import Split
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import read_header

N_PROMPT = 48
FIRST_TOKEN = 300  # of the prompt: the synthetic vocabulary's words begin at 259
RESERVE_S = 12.0  # for closing, rows and table
COUNTERS = (
    "n_hit_rows",
    "n_miss_rows",
    "n_late_rows",
    "n_loads",
    "n_evictions",
    "loaded_bytes",
    "load_us",
    "dispatch_us",
    "wait_us",
    "n_forward",
    "n_forward_both",
    "n_pinned_steals",
)
LAYER_TIMES = ("host_us", "device_us", "layer_us")


@dataclass(slots=True)
class Probe:
    """The decode loop's hook: passes on to the split, and keeps times and counters where warm-up ends."""

    split: Split | None
    n_warm: int
    n_tokens: int = 1  # the prompt's logits gave the first one
    n_steps: int = 0
    marks: list[tuple[float, int, dict[str, int]]] = field(default_factory=list)  # (s, tokens, counters)
    widths: list[int] = field(default_factory=list)  # of the measured steps' batches

    def n_draft_limit(self) -> int | None:
        return self.split.n_draft_limit() if self.split else None

    def after_prompt(self) -> None:
        if self.split:
            self.split.after_prompt()

    def after_step(self, step: StepRecord) -> None:
        if self.split:
            self.split.after_step(step)
        self.n_tokens += 1 + step.n_accepted
        if self.marks:
            self.widths.append(step.n_tokens)
        elif self.n_tokens >= self.n_warm:
            self.mark()

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), self.n_tokens, self._counters()))

    def _counters(self) -> dict[str, int]:
        if self.split is None:
            return {}
        board = self.split.engine.board
        values = {name: int(board.counters[0][name]) for name in COUNTERS}
        return values | {name: int(board.layer_stats[name].sum()) for name in LAYER_TIMES}


@dataclass(slots=True)
class Visit:
    """What one visit of a contender measured, over the tokens after the warm-up."""

    seconds: float
    n_tokens: int
    n_steps: int
    mean_width: float
    counters: dict[str, int]
    agreement: float
    pool_bytes: int
    scheduler_us: float | None

    @property
    def tps(self) -> float:
        return self.n_tokens / self.seconds


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


# ---- one visit -----------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(bench: Bench, arm: Arm) -> Iterator[tuple[Context, Split | None, int]]:
    """Context, split or None, and the longest draft of this contender."""
    options = arm.options(bench.path, bench.s)
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(new_context(bench, arm.placement))
        split = stack.enter_context(Split(context, bench.device, options)) if arm.is_split else None
        yield context, split, options.effective_draft_max


def visit(bench: Bench, arm: Arm, n_predict: int | None = None) -> Visit:
    """Warm-up and measured tokens of one contender, in a new context."""
    with opened(bench, arm) as (context, split, n_draft):
        probe = Probe(split, bench.s.warm_up)
        drafter = ReplayDrafter(bench.reference, bench.s.acceptance, bench.s.seed, bench.s.draft_ms)
        sampler = ReplaySampler(bench.reference[N_PROMPT:])
        loop = DecodeLoop(context, sampler, drafter, n_draft_max=n_draft, hook=probe)
        loop.run(bench.prompt(), n_predict or bench.n_predict)
        probe.mark()
        (t0, n0, before), (t1, n1, after) = probe.marks[0], probe.marks[-1]
        return Visit(
            seconds=t1 - t0,
            n_tokens=n1 - n0,
            n_steps=len(probe.widths),
            mean_width=float(np.mean(probe.widths)) if probe.widths else float("nan"),
            counters={name: after[name] - before[name] for name in before},
            agreement=sampler.agreement,
            pool_bytes=split.info.pool_bytes if split else 0,
            scheduler_us=split.scheduler.stats().step_p50_us if split else None,
        )


def compute_reference(bench: Bench) -> list[int]:
    """Prompt and its plain greedy continuation by stock, long enough for every draft."""
    with new_context(bench, "host") as context:
        loop = DecodeLoop(context, EndlessSampler(context.model.vocab))
        generation = loop.run(bench.prompt(), bench.n_predict + bench.s.draft_max)
    return bench.prompt() + generation.token_ids


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


# ---- rounds --------------------------------------------------------------------------------------


def take_turns(
    bench: Bench, arms: Sequence[Arm], deadline: Callable[[], float], say: Callable[[str], None]
) -> tuple[dict[str, list[Visit]], str | None]:
    """Visits per contender, as many whole rounds as fit; and why there are fewer than asked for."""
    visits: dict[str, list[Visit]] = {arm.name: [] for arm in arms}
    longest = 0.0
    for i_round in range(bench.s.rounds):
        if i_round and deadline() < longest * 1.1:
            return visits, f"{i_round} of {bench.s.rounds} rounds: the time is over"
        start = time.monotonic()
        for i in range(len(arms)):
            arm = arms[(i + i_round) % len(arms)]
            if deadline() <= 0:
                whole = min(len(v) for v in visits.values())
                return {name: v[:whole] for name, v in visits.items()}, f"{whole} rounds: the time is over"
            visits[arm.name].append(visit(bench, arm))
        longest = max(longest, time.monotonic() - start)
        say(f"{arms[0].group}, round {i_round + 1}: {one_round(visits)}")
    return visits, None


def one_round(visits: dict[str, list[Visit]]) -> str:
    return ", ".join(f"{name} {v[-1].tps:.1f}" for name, v in visits.items() if v)


def rows_of(bench: Bench, arms: Sequence[Arm], visits: dict[str, list[Visit]]) -> list[dict[str, Any]]:
    base = np.array([v.tps for v in visits[BASELINE]])
    return [row_of(bench, arm, visits[arm.name], base) for arm in arms if visits[arm.name]]


def row_of(bench: Bench, arm: Arm, visits: Sequence[Visit], base_tps: np.ndarray) -> dict[str, Any]:
    """Medians and spread over rounds; the ratio is paired by round."""
    tps = np.array([v.tps for v in visits])
    ratios = tps / base_tps[: len(tps)]
    expert_bytes = visits[0].pool_bytes if arm.is_split else device_expert_bytes(bench, arm)
    return {
        "arm": arm.name,
        "group": arm.group,
        "what": arm.what,
        "rounds": len(visits),
        "tps": median(tps),
        "tps_min": rounded(tps.min()),
        "tps_max": rounded(tps.max()),
        "tpot_ms": median(1e3 / tps),
        "ratio": median(ratios),
        "ratio_min": rounded(ratios.min()),
        "ratio_max": rounded(ratios.max()),
        "tps_rounds": [rounded(x) for x in tps],
        "tokens_per_step": median([v.n_tokens / max(1, v.n_steps) for v in visits]),
        "batch_width": median([v.mean_width for v in visits]),
        "device_expert_mib": rounded(expert_bytes / 2**20),
        "agreement": median([v.agreement for v in visits]),
        **(split_figures(visits) if arm.is_split else {}),
    }


def device_expert_bytes(bench: Bench, arm: Arm) -> int:
    layers = {layer.il: layer for layer in bench.geometry.moe_layers}
    chosen = bench.on_device if arm.placement == "ncmoe" else []
    return sum(layers[il].n_expert * layers[il].expert_bytes for il in chosen)


def split_figures(visits: Sequence[Visit]) -> dict[str, Any]:
    """What the engine counted, per step unless the name says otherwise; times are sums over layers."""

    def per_step(name: str, scale: float = 1.0) -> float:
        return median([v.counters[name] / scale / max(1, v.n_steps) for v in visits])

    def coverage(v: Visit) -> float:
        rows = [v.counters[name] for name in ("n_hit_rows", "n_miss_rows", "n_late_rows")]
        return rows[0] / max(1, sum(rows))

    return {
        "coverage": median([coverage(v) for v in visits]),
        "loads_per_step": per_step("n_loads"),
        "loaded_mib_per_step": per_step("loaded_bytes", 2**20),
        "evictions_per_step": per_step("n_evictions"),
        "wait_ms_per_step": per_step("wait_us", 1e3),
        "dispatch_ms_per_step": per_step("dispatch_us", 1e3),
        "host_ms_per_step": per_step("host_us", 1e3),
        "hidden_ms_per_step": median([hidden_ms(v) for v in visits]),
        "layer_ms_per_step": per_step("layer_us", 1e3),
        "copy_ms_per_step": per_step("load_us", 1e3),
        "pinned_steals": int(sum(v.counters["n_pinned_steals"] for v in visits)),
        "scheduler_us": median([v.scheduler_us or 0.0 for v in visits]),
    }


def hidden_ms(v: Visit) -> float:
    """Host experts' time per step in which the graph did not wait for them: the device was at work."""
    return (v.counters["host_us"] - v.counters["wait_us"]) / 1e3 / max(1, v.n_steps)


def median(values: Any) -> float:
    return rounded(float(np.median(values)))


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


# ---- the phase -----------------------------------------------------------------------------------


def run(
    s: Settings, left_s: float, model_path: str, emit: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All groups of contenders; rows go to `emit` as soon as a group is done."""
    end = time.monotonic() + left_s - RESERVE_S

    def deadline() -> float:
        return end - time.monotonic()

    skipped: list[list[str]] = []
    with contextlib.ExitStack() as stack:
        bench = open_bench(s, Path(model_path), stack, say)
        arms = without_impossible(bench, chosen_arms(s), skipped)
        if any(arm.placement == "ncmoe" for arm in arms):
            bench.models["ncmoe"] = stack.enter_context(load(bench, bench.on_device, say))
        bench.n_threads = choose_threads(bench, say)
        bench.reference = compute_reference(bench)
        for name in dict.fromkeys(arm.group for arm in arms):
            group = [arm for arm in arms if arm.group == name]
            if deadline() <= 0:
                skipped.append([name, "the time is over"])
                continue
            visits, why = take_turns(bench, group, deadline_of(name, arms, deadline), say)
            if why:
                skipped.append([f"rounds of {name}", why])
            if visits[BASELINE]:
                for row in rows_of(bench, group, visits):
                    emit(row | conditions(bench))
    return {"result": f"{len(bench.models)} placements, {bench.n_threads} threads", "skipped": skipped}


def deadline_of(name: str, arms: Sequence[Arm], deadline: Callable[[], float]) -> Callable[[], float]:
    """The controls leave a third of the time to the ablations, where both are asked for."""
    if name != "controls" or all(arm.group == "controls" for arm in arms):
        return deadline
    kept = deadline() / 3
    return lambda: deadline() - kept


def without_impossible(bench: Bench, arms: list[Arm], skipped: list[list[str]]) -> list[Arm]:
    """Leave out --n-cpu-moe where it means nothing."""
    why = None
    if bench.device.is_cpu:
        why = "the device is the CPU, so all experts are on the host"
    elif not bench.on_device:
        why = f"no layer's experts fit into --cache {bench.s.cache}: it would equal stock"
    if why is None or all(arm.placement != "ncmoe" for arm in arms):
        return arms
    skipped.append(["ncmoe-ar, ncmoe-sd", why])
    return [arm for arm in arms if arm.placement != "ncmoe"]


def conditions(bench: Bench) -> dict[str, Any]:
    """What holds for all rows, and what of it is emulated."""
    s = bench.s
    n_moe = bench.geometry.n_moe_layer
    emulated = []
    if bench.device.is_cpu:
        emulated.append("device emulated on the CPU")
    if s.copy_gb_s:
        emulated.append(f"link emulated at {s.copy_gb_s} GB/s")
    return {
        "device": bench.device.name,
        "device_description": bench.device.description,
        "emulated": emulated,
        "pool_capped": not bench.device.is_cpu and bench.device.memory_free > bench.cache_bytes,
        "model": bench.path.name,
        "n_layer": bench.geometry.n_layer,
        "experts_mib": rounded(bench.geometry.experts_bytes / 2**20),
        "cache": s.cache,
        "n_cpu_moe": n_moe - len(bench.on_device),
        "n_threads": bench.n_threads,
        "split_threads": s.split_threads or "auto",
        "drafts": f"replayed at acceptance {s.acceptance}",
        "draft_max": s.draft_max,
        "draft_ms": s.draft_ms,
        "warm_up": s.warm_up,
        "tokens": s.tokens,
        "seed": s.seed,
    }


def say(text: str) -> None:
    print(f"    {text}", flush=True)
