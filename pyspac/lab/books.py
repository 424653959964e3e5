"""The counts of one run, and the check that they balance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Books:
    """Accesses are distinct (step, layer, expert); activations are (token, layer, expert)."""

    n_layer: int
    n_first: int | None = None  # decoded tokens of coverage_first; None: it is not reported
    accesses: int = 0
    hits: int = 0
    misses: int = 0  # late ones included
    late_loads: int = 0  # misses whose copy was in flight
    collision_misses: int = 0  # misses of an expert evicted earlier in the same step
    loads: int = 0  # copies completed
    evictions: int = 0
    bypassed: int = 0  # fetched, used, not kept
    bytes_moved: float = 0.0
    activations: int = 0
    covered_activations: int = 0  # whose expert was resident and ready
    first_activations: int = 0  # of the steps that emitted the first n_first tokens
    first_covered: int = 0
    router_weight: float = 0.0
    lost_weight: float = 0.0  # of experts dropped or replaced
    low_bit_weight: float = 0.0  # of experts computed from a low-precision copy
    stall_us: float = 0.0  # the device waited for a copy or for the host
    device_us: float = 0.0
    host_us: float = 0.0
    link_us: float = 0.0
    total_us: float = 0.0  # of decoding
    ttft_us: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    at_step: tuple[int, int] = (0, 0)  # activations and covered ones when the last step ended
    misses_by_layer: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    collisions_by_layer: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    loaded_bytes_by_layer: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        self.misses_by_layer = np.zeros(self.n_layer, np.int64)
        self.collisions_by_layer = np.zeros(self.n_layer, np.int64)
        self.loaded_bytes_by_layer = np.zeros(self.n_layer)

    def end_step(self, n_emitted: int, n_draft: int) -> None:
        """Count a step that is over; one that emitted nothing was the prompt."""
        before, self.at_step = self.at_step, (self.activations, self.covered_activations)
        if n_emitted > 0 and self.tokens < (self.n_first or 0):
            self.first_activations += self.at_step[0] - before[0]
            self.first_covered += self.at_step[1] - before[1]
        self.steps += 1
        self.tokens += n_emitted
        self.drafted += n_draft

    def check(self, n_resident: int, n_loading: int, n_preloaded: int) -> None:
        """Re-count; an AssertionError here is a bug of the lab."""
        assert self.hits + self.misses == self.accesses, "hits and misses do not add up"
        assert max(self.collision_misses, self.late_loads) <= self.misses
        assert int(self.misses_by_layer.sum()) == self.misses
        assert int(self.collisions_by_layer.sum()) == self.collision_misses
        assert self.covered_activations <= self.activations
        assert abs(self.loaded_bytes_by_layer.sum() - self.bytes_moved) < 1.0, "bytes do not add up"
        kept = self.loads + n_loading - self.bypassed - self.evictions + n_preloaded
        assert kept == n_resident + n_loading, "loads and evictions do not explain what is resident"

    def to_dict(self) -> dict[str, Any]:
        """Return the measures under their report names; times are predicted."""
        gb = self.bytes_moved / 1e9
        total_ms = self.total_us / 1e3
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {
            **counts,
            "bytes_moved": int(self.bytes_moved),
            "coverage": self.covered_activations / max(self.activations, 1),
            "coverage_first": self.first_covered / max(self.first_activations, 1) if self.n_first else None,
            "expert_coverage": self.hits / max(self.accesses, 1),
            "collision_rate": self.collision_misses / max(self.accesses, 1),
            "coverage_per_gb": self.covered_activations / max(self.activations, 1) / gb if gb else None,
            "fidelity": 1.0 - self.lost_weight / max(self.router_weight, 1e-12),
            "low_bit_share": self.low_bit_weight / max(self.router_weight, 1e-12),
            "predicted_stall_ms": self.stall_us / 1e3,
            "predicted_device_ms": self.device_us / 1e3,
            "predicted_host_ms": self.host_us / 1e3,
            "predicted_link_ms": self.link_us / 1e3,
            "predicted_ttft_ms": self.ttft_us / 1e3,
            "predicted_tpot_ms": total_ms / max(self.tokens, 1),
            "predicted_tps": 1e3 * self.tokens / total_ms if total_ms else None,
            "misses_by_layer": self.misses_by_layer.tolist(),
            "collisions_by_layer": self.collisions_by_layer.tolist(),
        }


_COUNTS = (
    "accesses", "hits", "misses", "late_loads", "collision_misses", "loads", "evictions", "bypassed",
    "activations", "covered_activations", "tokens", "steps", "drafted",
)  # fmt: skip
