"""Experts on disk, foreseen: a model's header, memory and measured speeds in, what fits where and the speed
to expect out.

A token reads what is not an expert and its experts from memory, those that are absent from the disk first.
Absent experts of a layer are read at once, while those that are there are computed, and are computed then;
layers come one after the other. Which experts a text uses decides how many are absent: at worst all are used
alike, and what memory holds is found as often as its share; the recorded traces say what real texts do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Self

import numpy as np

from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.geometry import MoeGeometry
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.memory_tier import least_bytes, n_slots

# share of the experts in memory -> share of those in use that are there: the lower of Qwen3-30B-A3B and
# Gemma-4-26B-A4B, 128 tokens each, from memory that is empty at first (`pyspac lab run TRACE --eviction ema
# --miss fetch --prefetch none --k 0 --capacity ...`)
_HELD: Final = (0.0, 0.05, 0.10, 0.17, 0.25, 0.40, 1.0)
_FOUND: Final = (0.0, 0.37, 0.55, 0.69, 0.79, 0.89, 1.0)


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


def forecast(
    header: GgufHeader, geometry: MoeGeometry, ram_bytes: int, disk: DiskSpeed, host_gb_s: float
) -> TierForecast:
    """`host_gb_s`: streaming read of the host's memory, 1e9 bytes per second."""
    n_in_memory = n_slots(geometry, ram_bytes)
    share = n_in_memory / geometry.n_experts_total
    is_enough = ram_bytes >= min(least_bytes(geometry), geometry.experts_bytes)
    dense = dense_bytes(header, geometry)
    alike, recorded = (
        1e6 / token_us(geometry, dense, found, disk, host_gb_s) if is_enough else None
        for found in (share, found_share(share))
    )
    return TierForecast(
        ram_bytes=ram_bytes, least_bytes=least_bytes(geometry), n_in_memory=n_in_memory,
        n_on_disk=geometry.n_experts_total - n_in_memory,
        other_bytes=geometry.model_bytes - geometry.experts_bytes, tps_alike=alike, tps_recorded=recorded,
    )  # fmt: skip


def found_share(held: float) -> float:
    """Of the experts in use, what is there where memory holds that share of all: as in recorded traces."""
    return max(held, float(np.interp(held, _HELD, _FOUND)))


def token_us(geometry: MoeGeometry, dense: int, found: float, disk: DiskSpeed, host_gb_s: float) -> float:
    """Time of one token; `dense`: bytes besides experts, `found`: share of the experts in use in memory."""
    host_us = dense / (host_gb_s * 1e3)
    for layer in geometry.moe_layers:
        used = min(geometry.n_expert_used, layer.n_expert) * layer.expert_bytes
        absent = used * (1.0 - found)
        chance = 1.0 - found ** min(geometry.n_expert_used, layer.n_expert)  # that any is absent
        read_us = chance * disk.latency_us + absent / (disk.depth_32_gb_s * 1e3)
        host_us += max((used - absent) / (host_gb_s * 1e3), read_us) + absent / (host_gb_s * 1e3)
    return host_us


def dense_bytes(header: GgufHeader, geometry: MoeGeometry) -> int:
    """What each token reads besides experts: of the embeddings one row, unless they are the output too."""
    sizes = {tensor.name: tensor.n_bytes for tensor in header.tensors}
    table = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    return geometry.model_bytes - geometry.experts_bytes - table
