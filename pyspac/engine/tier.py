"""The memory tier's figures as reports show them: experts on disk, and the pool that holds some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspac.engine.ahead import share

if TYPE_CHECKING:
    from pyspac.engine.board import Board

_STATE = ("pool_bytes", "n_slots", "n_resident", "is_direct")  # all others only grow


def read_tier(board: Board) -> dict[str, Any]:
    """Return the board's figures, as of the last forward; all zero without such a tier."""
    row = board.tier[0]
    return {name: row[name].item() for name in row.dtype.names if name != "error"}


def since(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what happened between two `read_tier`s; sizes are those of now."""
    return {name: value if name in _STATE else value - before[name] for name, value in now.items()}


def tier_dict(figures: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `tier` of `--json`: the figures and what follows from them; None: there is no such tier.

    `hit_share`: of the distinct (layer, expert) asked for, those in memory or on their way; `depth`: reads
    that were under way on average while there were any. Both None before the first.
    """
    if not figures["n_slots"]:
        return None
    return {
        **{name: value for name, value in figures.items() if name != "error"},
        "hit_share": share(figures["n_hit"], figures["n_hit"] + figures["n_miss"]),
        "depth": share(figures["read_us"], figures["busy_us"]),
    }
