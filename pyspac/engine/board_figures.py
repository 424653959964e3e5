"""What an engine did since it was attached, read off its board: the objects of `--json`, and shares."""

from __future__ import annotations

from typing import Final

from pyspac.engine.board import STAGE_FIELDS, BoardView

_COUNTED: Final = ("n_hit", "n_miss", "n_late", "n_loads", "n_evictions", "loaded_bytes", *STAGE_FIELDS)
# what `--json` says of a run without the engine
NO_EXPERTS: Final = dict.fromkeys(("n_slots", "pool_bytes", *_COUNTED, "n_steps_with_both"), 0)


def experts_dict(board: BoardView) -> dict[str, int]:
    """`experts` of `--json`; distinct (layer, expert) pairs per forward pass."""
    counters = board.counters[0]
    return {
        "n_slots": board.n_slots,
        "pool_bytes": int(board.devices["pool_bytes"].sum()),
        **{name: int(counters[name]) for name in _COUNTED},
        "n_steps_with_both": int(counters["n_forward_both"]),
    }


def coverage(board: BoardView) -> float | None:
    """Share of (token, expert) activations whose expert was on the device; None before the first."""
    counters = board.counters[0]
    n_hit = int(counters["n_hit_rows"])
    n_all = n_hit + int(counters["n_miss_rows"]) + int(counters["n_late_rows"])
    return n_hit / n_all if n_all else None


def time_us(board: BoardView, name: str) -> int:
    """Sum over layers of `host_us` or `device_us` of spac_layer_stats."""
    return int(board.layer_stats[name].sum())
