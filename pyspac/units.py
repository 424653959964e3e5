"""Sizes and speeds, as text for people; `pyspac.engine.values` reads them."""

from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30


def number_text(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def size_text(n_bytes: float) -> str:
    """Say a size for people: in MiB below 1 GiB, else in GiB."""
    if round(n_bytes / MIB) < GIB // MIB:
        return f"{n_bytes / MIB:.4g} MiB"
    return f"{n_bytes / GIB:,.2f}".rstrip("0").rstrip(".") + " GiB"
