"""Utility and residency of all experts in, rows of coloured cells out: [n_layer, n_expert] as text.

Green cells are on the device, grey to orange ones on the host: the brighter, the higher the utility. So a
bright orange cell is an expert that is wanted and not there. Where experts stay on disk, those that memory
has not are purple.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.style import Style
from rich.text import Text

from pyspac.engine.board import Residency
from pyspac.server.snapshot import Observation

N_SHADES: Final = 12
MAX_CELL_WIDTH: Final = 3
MARGIN: Final = 26  # columns for layer numbers, tau and counts
# further rows of the palette: cells that do not exist; experts that neither device nor memory holds
_BLACK: Final = 4
_ON_DISK: Final = 5

# from utility 0 to the highest, per residency
_RAMPS: Final[dict[int, tuple[tuple[int, int, int], tuple[int, int, int]]]] = {
    Residency.ABSENT: ((30, 32, 38), (232, 126, 40)),
    Residency.QUEUED: ((90, 80, 20), (240, 220, 70)),
    Residency.LOADING: ((30, 70, 120), (90, 180, 255)),
    Residency.RESIDENT: ((16, 74, 50), (70, 230, 140)),
    _ON_DISK: ((58, 22, 74), (216, 90, 236)),
}


def _palette() -> NDArray[np.uint8]:
    """[6, N_SHADES, 3] colours by residency and shade."""
    colours = np.zeros((6, N_SHADES, 3), np.uint8)
    for state, (low, high) in _RAMPS.items():
        colours[state] = np.linspace(low, high, N_SHADES).astype(np.uint8)
    return colours


_PALETTE: Final = _palette()


def colour_codes(seen: Observation) -> NDArray[np.intp]:
    """[n_layer, n_expert] row of the palette * N_SHADES + shade; layers that are not split are black."""
    highest = max(1, int(seen.utility.max(initial=0)))
    shade = seen.utility.astype(np.intp) * (N_SHADES - 1) // highest
    state = np.where(seen.is_split[:, None], np.minimum(seen.residency, Residency.RESIDENT), _BLACK)
    if seen.tier is not None:
        state[(state == Residency.ABSENT) & (seen.in_memory == 0)] = _ON_DISK
    return np.asarray(state * N_SHADES + shade)


def _colour(code: int) -> Color:
    return Color.from_rgb(*(int(part) for part in _PALETTE[code // N_SHADES, code % N_SHADES]))


class HeatMap:
    """Draws observations into a given space: a row per layer if they fit, else two layers per row."""

    def __init__(self) -> None:
        self._styles: dict[tuple[int, int], Style] = {}

    def draw(self, seen: Observation, width: int, height: int) -> Text:
        """As many lines as the layers need; columns beyond `width` are cut."""
        codes = colour_codes(seen)
        n_layer, n_expert = codes.shape
        is_dense = n_layer > height
        cell_width = max(1, min(MAX_CELL_WIDTH, (width - MARGIN) // n_expert))
        per_row = 2 if is_dense else 1
        lines = [self._line(seen, codes, il, per_row, cell_width) for il in range(0, n_layer, per_row)]
        return Text("\n", no_wrap=True, overflow="crop").join(lines)

    def _line(
        self, seen: Observation, codes: NDArray[np.intp], il: int, per_row: int, cell_width: int
    ) -> Text:
        rows = codes[il : il + per_row]
        line = Text(f"{il:3d} ", style="dim")
        top, bottom = rows[0].tolist(), rows[-1].tolist()
        for upper, lower in zip(top, bottom, strict=True):
            cell = "▀" if per_row == 2 else " "
            line.append(cell * cell_width, self._style(upper, lower))
        return line.append_text(_layer_text(seen, slice(il, il + per_row)))

    def _style(self, upper: int, lower: int) -> Style:
        key = (upper, lower)
        if key not in self._styles:
            self._styles[key] = Style(color=_colour(upper), bgcolor=_colour(lower))
        return self._styles[key]


def _layer_text(seen: Observation, layers: slice) -> Text:
    """tau and how many experts are on the device (+ in memory, where some are not), of one row's layers."""
    n_resident = np.count_nonzero(seen.residency[layers] == Residency.RESIDENT, axis=1)
    tau = "/".join(str(value) for value in seen.tau[layers].tolist())
    counts = "/".join(str(value) for value in n_resident.tolist())
    if seen.tier is not None:
        counts += "+" + "/".join(str(value) for value in seen.in_memory[layers].sum(axis=1).tolist())
    return Text(f"  tau {tau:<6} {counts}", style="dim")


def legend(*, has_tier: bool = False) -> Text:
    """What the colours mean; `has_tier`: experts stay on disk."""
    text = Text("    ")
    host = [(Residency.ABSENT, "in memory"), (_ON_DISK, "on disk")]
    for state, name in (
        (Residency.RESIDENT, "on the device"),
        (Residency.LOADING, "being copied"),
        (Residency.QUEUED, "queued"),
        *(host if has_tier else [(Residency.ABSENT, "on the host")]),
    ):
        for shade in (0, N_SHADES // 2, N_SHADES - 1):
            text.append("  ", Style(bgcolor=_colour(state * N_SHADES + shade)))
        text.append(f" {name}   ")
    return text.append("brighter: higher utility", "dim")
