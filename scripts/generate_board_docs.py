"""Write the table of the board's arrays in docs/c-abi.md: `python scripts/generate_board_docs.py`.

In: SPAC_BOARD_FIELDS of spac.h, as libspac was built with it. Out: the text between the two markers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
PAGE: Final = REPOSITORY / "docs" / "c-abi.md"
BEGIN: Final = (
    "<!-- board: written by scripts/generate_board_docs.py from spac.h: change the list, then run it -->\n"
)
END: Final = "<!-- board: end -->\n"
# index = spac_board_writer
WRITERS: Final = ("engine", "engine, at once", "scheduler, in a decision", "scheduler")


def render(page: str) -> str:
    """The page with the table as it should be."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + _table() + END, page, flags=re.DOTALL)


def _table() -> str:
    from pyspac.engine.board import BoardGeometry, LocalBoard

    board = LocalBoard(BoardGeometry.uniform(n_layer=1, n_expert=1, n_expert_used=1, n_slots=1))
    rows = (
        f"| `{f.name}` | `{f.type}` | {_shape(f.shape)} | {WRITERS[f.writer]} | {f.meaning} |"
        for f in board.fields()
    )
    return "\n".join(["| field | type | shape | writer | meaning |", "|---|---|---|---|---|", *rows, ""])


def _shape(dims: str) -> str:
    return f"[{dims.strip('()')}]".replace("*", "\\*")


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
