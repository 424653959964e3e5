"""Phase `measure`: what host memory and link give, before anything is compared."""

from __future__ import annotations

from typing import Any

import psutil
from settings import Settings

from pyspac.engine import engine as native
from pyspac.engine.devices import choose_device


def run(s: Settings) -> dict[str, Any]:
    """GB/s of host memory with one thread, with half of the cores and with all, and of the link."""
    n = len(psutil.Process().cpu_affinity())
    host = {count: native.measure_host_gb_s(count) for count in sorted({1, max(1, n // 2), n})}
    device = choose_device(s.device, s.rpc)
    link = None if device.is_cpu else native.measure_link_gb_s(device.name)
    row = {
        "row": "bandwidth",
        "device": device.name,
        "host_gb_s": {str(count): round(value, 1) for count, value in host.items()},
        "link_gb_s": None if link is None else round(link, 1),
    }
    link_text = "no link: the device is the CPU" if link is None else f"link {link:.1f} GB/s"
    host_text = ", ".join(f"{value:.0f} GB/s with {count} threads" for count, value in host.items())
    skipped = [["link", "the device is the CPU"]] if link is None else []
    return {"result": f"host memory {host_text}; {link_text}", "rows": [row], "skipped": skipped}
