"""The table of patches in patches/README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tools.patches.queue import PATCH_DIR, Patch

README: Final = PATCH_DIR / "README.md"
TABLE_BEGIN = "<!-- table: written by python -m tools.patches export -->"
TABLE_END = "<!-- table end -->"


def total_size(patches: Sequence[Patch]) -> str:
    return f"+{sum(p.n_added for p in patches)} -{sum(p.n_removed for p in patches)}"


def table_rows(patches: Sequence[Patch]) -> list[tuple[str, ...]]:
    """Return of each patch: link, subject, size, number of files, status; the rest is in the patch."""
    return [
        (f"[{p.name[: p.name.index('-')]}]({p.name})", p.subject, p.size, str(len(p.paths)), p.status)
        for p in patches
    ]


def table_block(patches: Sequence[Patch]) -> str:
    lines = [TABLE_BEGIN, "| patch | subject | lines | files | status |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(patches)]
    lines += [f"| total: {len(patches)} | | {total_size(patches)} | | |", TABLE_END]
    return "\n".join(lines)


def write_table(patches: Sequence[Patch]) -> None:
    text = README.read_text()
    begin, end = text.index(TABLE_BEGIN), text.index(TABLE_END) + len(TABLE_END)
    README.write_text(text[:begin] + table_block(patches) + text[end:])
