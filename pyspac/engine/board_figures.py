"""What an engine became when it was attached, and did since: read off its board."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspac.engine.board import Board

# what a prompt's experts did that passed through the slots
_STAGE_FIELDS: Final = ("n_staged", "staged_bytes", "staged_us", "stage_wait_us")
_COUNTED: Final = ("n_hit", "n_miss", "n_late", "n_loads", "n_evictions", "loaded_bytes", *_STAGE_FIELDS)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine became when it attached; spac_engine_info of its board."""

    device: str  # ggml's name
    is_emulated: bool  # the device is the CPU itself, or the link is throttled
    host_mode: int  # spac_host_mode, as it was chosen
    n_layer: int
    n_expert: int
    n_expert_used: int
    n_layer_split: int
    n_layer_declined: int
    n_group: int
    n_slots: int  # over all groups
    pool_bytes: int  # device memory of the pools, guard slots included
    total_bytes: int  # of all experts of the split layers
    max_batch: int
    n_layer_kernels: int  # split layers whose host experts the engine's own kernels compute
    kernels: str  # which of them: "amx", "avx512", "avxvnni", "avx2", "neon"; "" if they compute nothing
    n_layer_unpinned: int  # split layers whose experts are not in memory pinned by the device
    n_dense_kernels: int  # other matrices that the engine's own kernels multiply; only without a device
    n_device: int  # 0: none


# what `--json` says of a run without the engine
NO_EXPERTS: Final = dict.fromkeys(("n_slots", "pool_bytes", *_COUNTED, "n_steps_with_both"), 0)


def experts_dict(board: Board) -> dict[str, int]:
    """`experts` of `--json`; distinct (layer, expert) pairs per forward pass."""
    counters = board.counters[0]
    return {
        "n_slots": board.n_slots,
        "pool_bytes": int(board.devices["pool_bytes"].sum()),
        **{name: int(counters[name]) for name in _COUNTED},
        "n_steps_with_both": int(counters["n_forward_both"]),
    }


def coverage(board: Board) -> float | None:
    """Share of (token, expert) activations whose expert was on the device; None before the first."""
    counters = board.counters[0]
    n_hit = int(counters["n_hit_rows"])
    n_all = n_hit + int(counters["n_miss_rows"]) + int(counters["n_late_rows"])
    return n_hit / n_all if n_all else None


def router_weight_kept(board: Board) -> float | None:
    """Share of the router's weight whose experts were computed exactly (`--lossy`); None if all are."""
    counters = board.counters[0]
    weight = int(counters["router_weight"])
    return int(counters["router_weight_kept"]) / weight if weight else None


def kl_divergence(board: Board) -> dict[str, Any] | None:
    """What `--max-kl` limits, in nats per token; None without it, and before the first token.

    `mean`: of all tokens, as estimated; `of_lossy`: of those that are not exact, as the samples had it.
    """
    counters = board.counters[0]
    n_tokens, n_samples = int(counters["n_kl_tokens"]), int(counters["n_kl_samples"])
    if not n_tokens:
        return None
    return {
        "mean": int(counters["kl_total"]) / 1e6 / n_tokens,
        "of_lossy": int(counters["kl_sampled"]) / 1e6 / n_samples if n_samples else None,
        "n_samples": n_samples,
    }


def time_us(board: Board, name: str) -> int:
    """Sum over layers of `host_us` or `device_us` of spac_layer_stats, which some calls tell."""
    stats = board.layer_stats
    if name == "host_us":
        return int(stats[name].sum())
    return int((stats[name] * stats["n_calls"] / stats["n_timed_calls"].clip(min=1)).sum())


def read_info(board: Board) -> EngineInfo:
    """What attaching decided."""
    row = board.info[0]
    texts: dict[str, Any] = {name: row[name].item().decode() for name in ("device", "kernels")}
    return EngineInfo(**{name: row[name].item() for name in EngineInfo.__slots__} | texts)


def read_declined(board: Board) -> dict[int, str]:
    """The MoE layers that llama.cpp computes by itself, and why."""
    reasons = (text.partition(b"\0")[0].decode() for text in board.declined["text"].tolist())
    return {il: reason for il, reason in enumerate(reasons) if reason}
