"""The prediction of a step's time in docs/gpu.md, beside what was measured: rows in, a sentence out."""

from __future__ import annotations

from typing import Any, Final

# microseconds; where they come from, and which are assumed, says docs/gpu.md
COPY_US: Final = 6.0
LAUNCH_US: Final = 2.5
WAIT_US: Final = 1.0
COPY_IN_GRAPH_US: Final = 2.0

# per layer, as counted on the emulated GPU (`python -m tools.cuda_emulator.calls`)
STOPS_US: Final = 4 * COPY_US + 2 * LAUNCH_US + 11 * WAIT_US
STREAM_COPIES_US: Final = 4 * COPY_IN_GRAPH_US
N_HOST_FUNCTIONS: Final = 2

BREAK_EVEN_US: Final = (STOPS_US - STREAM_COPIES_US) / N_HOST_FUNCTIONS


def host_function_us(stops_ms: float, stream_ms: float, n_layer: int) -> float:
    """What a function of the host costs the stream, of steps' times with stops and in the stream.

    All else in a step is the same in both. Below 0: the stops cost more than predicted.
    """
    saved_us = 1e3 * (stops_ms - stream_ms) / n_layer
    return (STOPS_US - STREAM_COPIES_US - saved_us) / N_HOST_FUNCTIONS


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """A line if both forms of the graph were measured on a device that calls functions, else none."""
    steps = {row["arm"]: row["tpot_ms"] * row["tokens_per_step"] for row in rows}
    if rows and rows[0]["emulated"]:
        return []
    try:
        stops, stream = steps["split-ema-stops"], steps["split-ema"]
    except KeyError:
        return []
    n_layer = rows[0]["n_layer"]
    at = host_function_us(stops, stream, n_layer)
    return [
        f"a step in the stream takes {stream:.2f} ms, with stops {stops:.2f}: as docs/gpu.md predicts it for "
        f"a host function of {at:.1f} us (it wins below {BREAK_EVEN_US:.0f})"
    ]
