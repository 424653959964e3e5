"""What `pyspac inspect --ram` shows: a model and sizes in, measured speeds and a table of predictions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from pyspac.commands.machine_speed import measure
from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.geometry import MoeGeometry
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.known_models import Weights
from pyspac.model.memory_tier import MEANS_MIB
from pyspac.model.speed_forecast import Machine
from pyspac.model.tier_forecast import TierForecast, forecast
from pyspac.units import MIB, number_text, size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """Experts on disk and in memory, for some sizes of that memory."""

    machine: Machine
    forecasts: list[TierForecast]

    @classmethod
    def measure(cls, header: GgufHeader, geometry: MoeGeometry, sizes: Sequence[int], n_threads: int) -> Self:
        """`sizes`: bytes for experts. Raises PyspacError if disk or memory cannot be measured."""
        weights = Weights.of_file(header, geometry, {})
        machine = measure(
            n_threads, 0, 0, header.path, weights.types, geometry.matrix_bytes, has_prompts=False
        )
        found = [forecast(weights, geometry, size, machine) for size in sizes]
        return cls(machine=machine, forecasts=found)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "disk": self.machine.disk.to_dict(),
            "host_gb_s": self.machine.memory_gb_s,
            "predicted": [found.to_dict() for found in self.forecasts],
        }

    def show(self, console: Console) -> None:
        table = Table(
            "for experts", "in memory", "on disk", "the rest", "tokens/s, predicted",
            box=None, padding=(0, 2, 0, 0), title_justify="left",
        )  # fmt: skip
        table.title = "\nexperts on disk (--ram)"
        for found in self.forecasts:
            table.add_row(
                size_text(found.ram_bytes), str(found.n_in_memory), str(found.n_on_disk),
                size_text(found.other_bytes), _speed(found),
            )  # fmt: skip
        console.print(table)
        console.print(
            f"\nmeasured: disk {disk_text(self.machine.disk)}; memory {self.machine.memory_gb_s:.1f} GB/s. "
            "Predicted without drafts: low if all experts are used alike, high if as in recorded texts"
        )
        if any(found.tps_alike is None for found in self.forecasts):
            console.print(MEANS_MIB)


def _speed(found: TierForecast) -> str:
    if found.tps_alike is None or found.tps_recorded is None:
        return f"too little: {-(-found.least_bytes // MIB)} MiB at least"
    low, high = number_text(found.tps_alike), number_text(found.tps_recorded)
    return low if low == high else f"{low} to {high}"


def disk_text(disk: DiskSpeed) -> str:
    """Its two speeds, how they were read, and whether they tell the latency of a read."""
    how = "" if disk.is_direct else ", through the page cache (no O_DIRECT)"
    slow = "; slows down under load, so a read's latency cannot be told and counts as 0"
    return (
        f"{disk.depth_1_gb_s:.2f} GB/s at depth 1, {disk.depth_32_gb_s:.2f} at depth 32 "
        f"({disk.piece_bytes / MIB:.2g} MiB, random{how}){slow if disk.slows_under_load else ''}"
    )
