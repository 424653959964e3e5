"""The engine's own predictors: their names, and what came of what they said, as reports show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyspac.errors import UsageError

if TYPE_CHECKING:
    from pyspac.engine.board import Board

# predictors of the engine by their name in options: how many MoE layers ahead a router is asked
NEXT_LAYERS = {"next-layer": 1, "next-layer-2": 2, "next-layer-3": 3}
AHEAD_NAMES = NEXT_LAYER, DRAFT_GATE = "next-layer", "draft-gate"  # index = spac_ahead_source


def in_engine(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are predictors of the engine."""
    return [name for name in names if name in (*NEXT_LAYERS, DRAFT_GATE)]


def at_work(board: Board, names: Iterable[str]) -> list[str]:
    """Return the engine's predictors in `names`, and those of which only the board tells.

    It does not tell how far ahead routers are asked: all distances are "next-layer" then.
    """
    known = in_engine(names)
    told = {DRAFT_GATE if name == DRAFT_GATE else NEXT_LAYER for name in known}
    rows = zip(AHEAD_NAMES, board.ahead["n_inputs"], strict=True)
    return known + [name for name, n_inputs in rows if n_inputs and name not in told]


def share(part: float, whole: float) -> float | None:
    """Return part / whole: recall, precision and the like; None where there is nothing to divide by."""
    return part / whole if whole else None


def check_in_engine(names: Iterable[str], *, has_draft: bool) -> None:
    """Raise UsageError for predictors of the engine that do not go together, or have no draft model."""
    mine = in_engine(names)
    if len(mine) - (DRAFT_GATE in mine) > 1:
        raise UsageError(f"--predict {','.join(mine)} asks routers at two distances: choose one")
    if DRAFT_GATE in mine and not has_draft:
        raise UsageError(
            f"--predict {DRAFT_GATE} needs a draft model as wide as the target: give one with -md"
        )


def check_not_in_engine(names: Iterable[str]) -> None:
    """Raise UsageError for predictors that an engine which runs already cannot be given."""
    if mine := in_engine(names):
        raise UsageError(
            f"--predict {mine[0]} is the engine's: give it to the program that runs the model, by "
            f"`pyspac serve --predict {mine[0]}` or PYSPAC_PREDICT={mine[0]} in its environment"
        )


def ahead_dict(board: Board, name: str) -> dict[str, Any]:
    """Return the figures of one of NEXT_LAYERS or of DRAFT_GATE; shares and times: None before the first.

    `recall` is of the experts that the routers chose, distinct ones per layer and forward, in layers for
    which something was predicted; `precision` of those predicted.
    """
    row = board.ahead[AHEAD_NAMES.index(NEXT_LAYER if name in NEXT_LAYERS else name)]
    stats = {field: int(row[field]) for field in row.dtype.names}
    cutoff = {"cutoff_layer": stats["cutoff_layer"]} if name == DRAFT_GATE else {}
    return {
        "name": name,
        "recall": share(stats["n_hit"], stats["n_chosen"]),
        "precision": share(stats["n_hit"], stats["n_predicted"]),
        "us_per_layer": share(stats["us"], stats["n_inputs"] - stats["n_late"]),
        "us": stats["us"],
        "n_inputs": stats["n_inputs"],
        "n_inputs_late": stats["n_late"],
        "n_queued": stats["n_queued"],
        "n_refused": stats["n_cut"],
        "n_dropped": stats["n_dropped"],
        "n_copied": stats["n_copied"],
        "n_copies_used": stats["n_used"],
        "n_copies_wasted": stats["n_wasted"],
        **cutoff,
    }
