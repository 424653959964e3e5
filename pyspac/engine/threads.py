"""The threads that compute without a device, as reports show them, and whether others want their cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspac.engine.board import Board


def threads_dict(board: Board) -> dict[str, Any] | None:
    """Return `threads` of `--json`; None beside a device, and before the first forward.

    `share`: of the time in which it wanted a core, the part that the thread with the least had one.
    """
    row = board.threads[0]
    if not row["n_most"]:
        return None
    return {name: row[name].item() for name in row.dtype.names}


def threads_text(threads: dict[str, Any]) -> str:
    """Of one of these."""
    n = f"{threads['n_threads']} of {threads['n_most']}"
    return f"{n}, beside other programs ({threads['share']:.0%} of a core)" if threads["is_crowded"] else n
