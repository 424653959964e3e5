"""Rows of the comparison: visits in, medians and spread over rounds out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from arms import BASELINE, Arm
from bench import Bench
from visit import Visit


def rows_of(bench: Bench, arms: Sequence[Arm], visits: dict[str, list[Visit]]) -> list[dict[str, Any]]:
    base = np.array([v.tps for v in visits[BASELINE]])
    return [row_of(bench, arm, visits[arm.name], base) for arm in arms if visits[arm.name]]


def row_of(
    bench: Bench, arm: Arm, visits: Sequence[Visit], base_tps: npt.NDArray[np.float64]
) -> dict[str, Any]:
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
