"""What a board shows: a board in, an `Observation` per look out. Only reads, so any number may watch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board, LayerMode, Residency
from pyspac.engine.device_stats import DeviceFigures, read_devices
from pyspac.engine.step import StepTotals
from pyspac.engine.threads import threads_dict
from pyspac.engine.tier import read_tier, since, tier_dict
from pyspac.scheduler.activations import ActivationDrain, Activity


def ratio(part: float, whole: float) -> float | None:
    """None if there was nothing to take a share of."""
    return part / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A board at one moment, and what happened since the look before. None: nothing happened to measure."""

    seconds: float  # since the look before
    n_forward: int  # since then, as all n_*
    n_steps: int
    n_tokens: int
    n_decisions: int
    n_loads: int
    n_evictions: int
    loaded_bytes: int
    kept: float | None  # share of the router's weight that --lossy kept; None: nothing may be left out
    kl: float | None  # nats per token, as estimated with --max-kl; None: without it
    covered: float | None  # share of activations whose expert was on the device
    draft_length: float | None  # tokens drafted per step
    acceptance_rate: float | None  # accepted / drafted
    draft_us: float | None  # per step, as the next two
    verify_us: float | None
    process_us: float | None
    n_draft_max: dict[int, int]  # limits in force, by server slot, of those in use
    byte_budget: int | None  # per forward, of all devices
    devices: list[DeviceFigures]  # each, since its server began; none without
    n_slots: int
    utility: NDArray[np.uint8]  # [n_layer, n_expert]
    residency: NDArray[np.uint8]  # [n_layer, n_expert]
    tau: NDArray[np.uint8]  # [n_layer]
    is_split: NDArray[np.bool_]  # [n_layer]
    modes: NDArray[np.uint8]  # [n_layer] LayerMode
    copies: dict[str, Any] | None  # whether they pay: `chosen` and `gain`; None: not measured
    tier: dict[str, Any] | None  # experts on disk, as in `pyspac.engine.tier`; None: there are none
    threads: dict[str, Any] | None  # as in `pyspac.engine.threads`; None: a device computes, too
    in_memory: NDArray[np.uint8]  # [n_layer, n_expert] 1: the tier's memory has it

    @property
    def tokens_per_s(self) -> float | None:
        """None if no step ended."""
        return self.n_tokens / self.seconds if self.n_steps else None

    @property
    def loads_per_s(self) -> float:
        return self.n_loads / self.seconds

    @property
    def loaded_bytes_per_s(self) -> float:
        return self.loaded_bytes / self.seconds

    @property
    def n_resident(self) -> int:
        return int(np.count_nonzero(self.residency == Residency.RESIDENT))

    @property
    def n_whole(self) -> int:
        """Layers of which the device has all experts; their activations are not counted."""
        return int(np.count_nonzero(self.modes == LayerMode.WHOLE))

    def to_dict(self) -> dict[str, Any]:
        """For `pyspac top --json`."""
        return {
            "seconds": self.seconds,
            "n_forward": self.n_forward,
            "n_steps": self.n_steps,
            "n_tokens": self.n_tokens,
            "n_decisions": self.n_decisions,
            "n_loads": self.n_loads,
            "n_evictions": self.n_evictions,
            "loaded_bytes": self.loaded_bytes,
            "tokens_per_s": self.tokens_per_s,
            "loads_per_s": self.loads_per_s,
            "loaded_bytes_per_s": self.loaded_bytes_per_s,
            "covered": self.covered,
            "router_weight_kept": self.kept,
            "kl_divergence": self.kl,
            "draft_length": self.draft_length,
            "acceptance_rate": self.acceptance_rate,
            "draft_us": self.draft_us,
            "verify_us": self.verify_us,
            "process_us": self.process_us,
            "n_draft_max": self.n_draft_max,
            "byte_budget": self.byte_budget,
            "devices": [device.as_json() for device in self.devices],
            "n_slots": self.n_slots,
            "n_resident": self.n_resident,
            "n_whole": self.n_whole,
            "copies": self.copies,
            "tier": self.tier,
            "threads": self.threads,
            "layers": [self._layer_dict(il) for il in range(len(self.tau))],
        }

    def _layer_dict(self, il: int) -> dict[str, Any]:
        return {
            "il": il,
            "is_split": bool(self.is_split[il]),
            "mode": LayerMode(self.modes[il]).name.lower() if self.is_split[il] else None,
            "tau": int(self.tau[il]),
            "utility": self.utility[il].tolist(),
            "residency": self.residency[il].tolist(),
            "in_memory": None if self.tier is None else self.in_memory[il].tolist(),
        }


class BoardWatch:
    """Looks at a board; the first look reports what happens after it was made."""

    def __init__(self, board: Board, clock: Callable[[], float] = time.monotonic) -> None:
        self.board = board
        self._clock = clock
        self._drain = ActivationDrain(board)
        self._before_s = clock()
        self._tier_before = read_tier(board)

    def look(self) -> Observation:
        """Copies what it returns: the board goes on."""
        activity, now_s = self._drain.drain(), self._clock()
        seconds, self._before_s = max(1e-6, now_s - self._before_s), now_s
        return Observation(
            seconds=seconds, copies=self.board.read_fallback(), tier=self._look_at_tier(),
            threads=threads_dict(self.board), **_engine_part(activity),
            **_steps_part(activity.totals), **_decision(self.board),
        )  # fmt: skip

    def _look_at_tier(self) -> dict[str, Any] | None:
        before, self._tier_before = self._tier_before, read_tier(self.board)
        return tier_dict(since(self._tier_before, before))


def _engine_part(activity: Activity) -> dict[str, Any]:
    n_hit = activity.counter("n_hit_rows")
    n_rows = n_hit + activity.counter("n_miss_rows") + activity.counter("n_late_rows")
    names = ("n_forward", "n_decisions", "n_loads", "n_evictions", "loaded_bytes")
    kept = ratio(activity.counter("router_weight_kept"), activity.counter("router_weight"))
    kl = ratio(activity.counter("kl_total") / 1e6, activity.counter("n_kl_tokens"))
    return {
        "covered": ratio(n_hit, n_rows), "kept": kept, "kl": kl,
        **{name: activity.counter(name) for name in names},
    }  # fmt: skip


def _steps_part(totals: StepTotals) -> dict[str, Any]:
    n_steps = totals.n_steps
    return {
        "n_steps": n_steps,
        "n_tokens": totals.n_tokens,
        "draft_length": ratio(totals.n_draft, n_steps),
        "acceptance_rate": totals.acceptance_rate,
        "draft_us": ratio(totals.draft_us, n_steps),
        "verify_us": ratio(totals.verify_us, n_steps),
        "process_us": ratio(totals.process_us, n_steps),
    }


def _limits(board: Board) -> dict[int, int]:
    """Of the server slots that were in use lately, if they have one."""
    slots = np.unique(board.records["server_slot"][: int(board.n_records[0])])
    used = slots[(slots >= 0) & (slots < len(board.n_draft_max))].tolist()
    return {slot: int(board.n_draft_max[slot]) for slot in used if board.n_draft_max[slot] >= 0}


def _decision(board: Board) -> dict[str, Any]:
    budget = sum(board.byte_budget.tolist())
    return {
        "n_draft_max": _limits(board),
        "byte_budget": None if budget >= 2**63 else budget,
        "devices": read_devices(board),
        "n_slots": board.n_slots,
        "utility": np.array(board.utility),
        "residency": np.array(board.residency),
        "in_memory": np.array(board.in_memory),
        "tau": np.array(board.tau),
        "modes": np.array(board.whole),
        "is_split": np.asarray(board.expert_bytes) > 0,
    }
