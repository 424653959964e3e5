"""The machine model: speeds in, predicted times out. Nothing here is measured by the lab itself, but the disk
that a user names.

A layer takes the device's dense part, then the longer of device experts and host experts, then whatever it
has to wait for on the link. Experts at these widths are bound by memory, so bytes decide and arithmetic
only caps. While a copy runs it takes its share of the host's memory bandwidth.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from pyspac.errors import ConfigError
from pyspac.model.disk_probe import DEPTH, DiskSpeed
from pyspac.model.geometry import N_MATRICES

INSTANT_GB_S: Final = 1e9  # a link this fast takes no time at all
FLOP_PER_BYTE: Final = 3.5  # per row: two per weight, at 4.5 bits per weight
MIN_HOST_SHARE: Final = 0.25  # of the host's bandwidth that copies leave to its experts at least
DEVICE_TIMES_HOST: Final = 8.0  # where only the host was measured; as pyspac.scheduler.cost_model's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Speeds in 1e9 per second, latencies in microseconds."""

    name: str
    link_gb_s: float  # copies of single experts from pinned memory
    host_gb_s: float  # streaming read of all cores
    device_gb_s: float
    host_gflop_s: float
    device_gflop_s: float
    link_latency_us: float = 15.0  # per copy
    link_depth: int = 1  # copies that are asked for at once and share the latency
    layer_us: float = 40.0  # launches and synchronisation of one layer
    host_layer_us: float = 8.0  # waking the host's threads, where they have work in a layer
    step_us: float = 300.0  # output head, sampling, bookkeeping
    draft_us: float = 1200.0  # per drafted token
    vram_gib: float = 0.0  # for experts; informative
    is_shared: bool = True  # copies read the memory that host experts read

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("name", "is_shared"):
                continue
            is_speed = f.name.endswith("_s")
            if not isinstance(value, (int, float)) or value < 0 or (is_speed and value == 0):
                raise ConfigError(
                    f"machine {self.name}: {f.name}", value, "a number above 0" if is_speed else "0 or more"
                )

        if self.link_depth < 1:
            raise ConfigError(f"machine {self.name}: link_depth", self.link_depth, "1 or more")

    def copy_us(self, n_bytes: float, nth: int = 0) -> float:
        """Return how long one copy keeps the link busy; `nth`: of those that were asked for at once."""
        if self.link_gb_s >= INSTANT_GB_S:
            return 0.0
        latency_us = 0.0 if nth % self.link_depth else self.link_latency_us
        return latency_us + n_bytes / (self.link_gb_s * 1e3)

    def device_us(self, n_bytes: float, row_bytes: float) -> float:
        """Return the device's time for experts of n_bytes in all; row_bytes counts an expert once per row."""
        return max(
            n_bytes / (self.device_gb_s * 1e3), FLOP_PER_BYTE * row_bytes / (self.device_gflop_s * 1e3)
        )

    def host_us(self, n_bytes: float, row_bytes: float, link_busy_us: float) -> float:
        """Return the host's time for experts, with the link busy for the first link_busy_us."""
        if n_bytes <= 0:
            return 0.0
        compute = FLOP_PER_BYTE * row_bytes / (self.host_gflop_s * 1e3)
        fast = self.host_gb_s * 1e3  # bytes per microsecond
        slow = max(fast - self.link_gb_s * 1e3, MIN_HOST_SHARE * fast) if self.is_shared else fast
        slow_bytes = min(n_bytes, slow * link_busy_us)
        return self.host_layer_us + max(compute, slow_bytes / slow + (n_bytes - slow_bytes) / fast)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for reports."""
        return asdict(self)


# Data-sheet bandwidths; links and hosts at what copies and streaming reads usually reach of them.
PRESETS: Final = {
    machine.name: machine
    for machine in (
        Machine(name="rtx4090", link_gb_s=24.0, host_gb_s=65.0, device_gb_s=900.0, host_gflop_s=1500.0,
                device_gflop_s=80e3, vram_gib=22.0),
        Machine(name="rtx3060-laptop", link_gb_s=11.0, host_gb_s=40.0, device_gb_s=300.0, host_gflop_s=600.0,
                device_gflop_s=20e3, layer_us=50.0, draft_us=2500.0, vram_gib=5.0),
        Machine(name="h200", link_gb_s=50.0, host_gb_s=250.0, device_gb_s=4300.0, host_gflop_s=6000.0,
                device_gflop_s=400e3, link_latency_us=10.0, layer_us=30.0, draft_us=800.0, vram_gib=135.0),
        Machine(name="cpu-ssd", link_gb_s=5.0, host_gb_s=5.0, device_gb_s=50.0, host_gflop_s=1000.0,
                device_gflop_s=1000.0, link_latency_us=80.0, layer_us=5.0, host_layer_us=80.0,
                draft_us=12_000.0, vram_gib=16.0),
        # copies take no time: only for comparing counts, and for the engine's deterministic mode
        Machine(name="instant", link_gb_s=INSTANT_GB_S, host_gb_s=65.0, device_gb_s=900.0,
                host_gflop_s=1500.0, device_gflop_s=80e3, link_latency_us=0.0, is_shared=False),
    )
}  # fmt: skip


def disk_machine(disk: DiskSpeed, host_gb_s: float) -> Machine:
    """Return the machine whose "device" is memory and whose link is a disk, both measured.

    A miss that no policy fetches is read for its one use. What computing and drafts take is assumed.
    """
    return replace(
        PRESETS["cpu-ssd"],
        name="disk", link_gb_s=disk.depth_32_gb_s, link_latency_us=disk.latency_us,
        link_depth=DEPTH // N_MATRICES, host_gb_s=disk.depth_32_gb_s, host_layer_us=disk.latency_us,
        device_gb_s=host_gb_s,
    )  # fmt: skip


def load_machine(text: str) -> Machine:
    """Return a preset, or a machine from a JSON file: its fields, or what `pyspac doctor --json` wrote."""
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigError("--machine", text, f"one of {', '.join(PRESETS)}, disk=MODEL, or a JSON file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "findings" in data:
            return _from_doctor(path.stem, data["findings"])
        return Machine(**{"name": path.stem, **data})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        allowed = "an object with the fields of a machine, or the output of `pyspac doctor --json`"
        raise ConfigError("--machine", text, f"{allowed} ({error})") from error


def _from_doctor(name: str, findings: list[dict[str, Any]]) -> Machine:
    """Take host and link as measured; the device, which the doctor does not measure, at its usual ratio."""
    found = {f["what"]: float(m[1]) for f in findings if (m := re.match(r"([\d.]+) GB/s", str(f["detail"])))}
    if "host memory" not in found:
        raise ConfigError("--machine", name, "a doctor's report with the host's bandwidth")
    host = found["host memory"]
    link = found.get("link", host / 2)  # no device: an emulated one, copies within memory
    return replace(
        PRESETS["rtx4090"], name=name, host_gb_s=host, link_gb_s=link, device_gb_s=DEVICE_TIMES_HOST * host
    )
