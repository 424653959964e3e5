"""Which device computes: a name from the command line in, a `Device` out.

With the CPU as the device nothing of a graphics card is touched, and the split is emulated: both sides are
the CPU.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

import psutil

from pyspac.errors import ConfigError

RPC_TIMEOUT_S: Final = 5.0
MEMORY_SHARE: Final = 0.8  # of what is free
GPU_TYPES: Final = (1, 2)  # enum ggml_backend_dev_type: GPU, integrated GPU; RPC devices are GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A ggml device; memory in bytes. The CPU has no handle: it is always there."""

    name: str
    description: str
    handle: int | None
    memory_free: int
    memory_total: int

    @property
    def is_cpu(self) -> bool:
        return self.handle is None


def fits_memory(n_bytes: int) -> bool:
    """Whether so much may be copied out of a model's file; else it stays mapped."""
    return n_bytes < MEMORY_SHARE * psutil.virtual_memory().available


def cpu_device() -> Device:
    memory = psutil.virtual_memory()
    return Device(
        name="CPU", description="host", handle=None, memory_free=memory.available, memory_total=memory.total
    )


def gpu_devices() -> list[Device]:
    """All devices but the CPU, as ggml lists them."""
    from pyspac.engine import engine  # loads the native library

    return [
        Device(
            name=info.name,
            description=info.description,
            handle=info.handle,
            memory_free=info.memory_free,
            memory_total=info.memory_total,
        )
        for info in engine.devices()
        if info.type in GPU_TYPES
    ]


def choose_device(name: str, rpc: str | None = None) -> Device:
    """The device called `name` ("auto": that of `rpc`, else the GPU, else the CPU).

    "none" computes on the CPU too. Raises ConfigError listing the names if there is none of that name, or if
    "auto" would have to choose: one device is supported.
    """
    if name.lower() in ("cpu", "none"):
        return cpu_device()
    before = {device.name for device in gpu_devices()} if rpc else set()
    if rpc:
        _add_rpc(rpc)
    devices = gpu_devices()
    if name == "auto":
        return _only([device for device in devices if device.name not in before] or devices)
    for device in devices:
        if device.name.lower() == name.lower():
            return device
    raise ConfigError(
        "--device", name, "one of " + ", ".join(["auto", "cpu", "none", *(device.name for device in devices)])
    )


def _only(devices: list[Device]) -> Device:
    """The CPU if there is none."""
    if len(devices) > 1:
        names = ", ".join(device.name for device in devices)
        raise ConfigError("--device", "auto", f"one of {names}, as a context uses one GPU")
    return devices[0] if devices else cpu_device()


def _add_rpc(endpoint: str) -> None:
    """Register the devices of `endpoint`; ggml aborts the process if it cannot connect, so try first."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("--rpc", endpoint, "HOST:PORT, such as 192.168.1.7:50052")
    try:
        socket.create_connection((host.strip("[]"), int(port)), RPC_TIMEOUT_S).close()
    except OSError as error:
        wanted = f"the address of a running ggml-rpc-server (connecting failed: {error})"
        raise ConfigError("--rpc", endpoint, wanted) from error
    from pyspac.engine import engine

    engine.add_rpc(endpoint)
