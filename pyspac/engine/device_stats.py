"""What each device of a context has done, read off a board: its share of slots, copies and waits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pyspac.engine.board import Board, Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """One device; counts are cumulative, of the layers that it computes."""

    name: str
    is_emulated: bool  # the device is the CPU, or its link is throttled
    n_layers: int  # that are split
    n_slots: int
    n_resident: int
    pool_bytes: int
    n_device_rows: int  # (token, expert) pairs that it computed
    n_host_rows: int  # and that the host did
    coverage: float  # its share of both; nan before the first
    n_loads: int
    loaded_bytes: int
    load_s: float
    link_gb_s: float | None  # as its copies were measured; None: there was none
    wait_s: float  # that its layers waited for the host's experts

    def text(self) -> str:
        """A line of a report."""
        covered = "-" if np.isnan(self.coverage) else f"{self.coverage:.1%}"
        link = "" if self.link_gb_s is None else f" at {self.link_gb_s:.2g} GB/s"
        emulated = ", emulated" if self.is_emulated else ""
        return (
            f"{self.n_layers} layers, {self.n_resident} of {self.n_slots} slots, {covered} covered, "
            f"{self.n_loads} loads{link}{emulated}"
        )

    def as_json(self) -> dict[str, Any]:
        """All fields; `coverage` None before the first forward."""
        return asdict(self) | {"coverage": None if np.isnan(self.coverage) else round(self.coverage, 4)}


def read_devices(board: Board) -> list[DeviceFigures]:
    """The devices with slots, in the board's order; none where the device is "none"."""
    return [_figures(board, index) for index in range(board.n_device) if int(board.devices[index]["n_slots"])]


def _figures(board: Board, index: int) -> DeviceFigures:
    row = board.devices[index]
    layers = (board.layer_device == index) & (board.expert_bytes > 0)
    n_device = int(board.layer_stats["n_device_rows"][layers].sum())
    n_host = int(board.layer_stats["n_host_rows"][layers].sum())
    us = int(row["load_us"])
    return DeviceFigures(
        name=row["name"].decode(errors="replace"),
        is_emulated=bool(row["is_emulated"]) or float(row["copy_gb_s"]) > 0,
        n_layers=int(layers.sum()),
        n_slots=int(row["n_slots"]),
        n_resident=int((board.residency[layers] == Residency.RESIDENT).sum()),
        pool_bytes=int(row["pool_bytes"]),
        n_device_rows=n_device,
        n_host_rows=n_host,
        coverage=n_device / (n_device + n_host) if n_device + n_host else float("nan"),
        n_loads=int(row["n_loads"]),
        loaded_bytes=int(row["loaded_bytes"]),
        load_s=us / 1e6,
        link_gb_s=int(row["loaded_bytes"]) / us / 1e3 if us else None,
        wait_s=int(row["wait_us"]) / 1e6,
    )
