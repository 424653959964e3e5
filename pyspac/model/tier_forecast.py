"""Where a model's experts are, foreseen: sizes of memory in, how many experts each holds and the speed out.

Which experts a text uses decides how many are absent: at worst all are used alike, and what memory holds is
found as often as its share; the recorded traces say what real texts do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from pyspac.model.geometry import MoeGeometry
from pyspac.model.known_models import Weights
from pyspac.model.memory_tier import least_bytes, n_slots
from pyspac.model.speed_forecast import Machine, decode_tps, found_share


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast:
    """What `--ram` of so many bytes would come to. Speeds are predicted: tokens per second, no drafts."""

    ram_bytes: int
    least_bytes: int  # `--ram` can be
    n_in_memory: int  # experts, of all layers
    n_on_disk: int
    other_bytes: int  # what is not an expert: in memory, too
    tps_alike: float | None  # if all experts are used alike; None: too little memory to run
    tps_recorded: float | None  # if they are used as in the recorded traces

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the experts of all layers are, with a device beside memory and disk; numbers of experts."""

    vram_bytes: int  # of the device
    ram_bytes: int
    n_on_device: int
    n_in_memory: int  # of the others: what the device holds need not be there
    n_on_disk: int

    @classmethod
    def of(cls, geometry: MoeGeometry, vram_bytes: int, ram_bytes: int, others: int = 0) -> Self:
        """Once both are full; `others`: bytes of the device that something else takes.

        Without a tier, as all experts fit into memory, all are there as well.
        """
        n_all = geometry.n_experts_total
        n_on_device = geometry.n_experts_in(max(0, vram_bytes - others))
        n_in_memory = min(n_slots(geometry, ram_bytes, has_device=True), n_all - n_on_device)
        return cls(
            vram_bytes=vram_bytes, ram_bytes=ram_bytes, n_on_device=n_on_device,
            n_in_memory=n_in_memory, n_on_disk=n_all - n_on_device - n_in_memory,
        )  # fmt: skip

    def to_dict(self) -> dict[str, int]:
        """For `--json`."""
        return asdict(self)


def forecast(weights: Weights, geometry: MoeGeometry, ram_bytes: int, machine: Machine) -> TierForecast:
    """`ram_bytes`: for experts, beside all else."""
    n_in_memory = n_slots(geometry, ram_bytes)
    share = n_in_memory / geometry.n_experts_total
    is_enough = ram_bytes >= min(least_bytes(geometry), geometry.experts_bytes)
    alike, recorded = (
        decode_tps(weights, machine, found) if is_enough else None for found in (share, found_share(share))
    )
    return TierForecast(
        ram_bytes=ram_bytes, least_bytes=least_bytes(geometry), n_in_memory=n_in_memory,
        n_on_disk=geometry.n_experts_total - n_in_memory,
        other_bytes=geometry.model_bytes - geometry.experts_bytes, tps_alike=alike, tps_recorded=recorded,
    )  # fmt: skip
