"""Which device computes: a name from the command line in, a `Device` out.

Without a GPU there is none: the CPU computes everything. Where the device is emulated, the CPU is both sides
of the split. Either way nothing of a graphics card is touched.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from pyspac.engine.memory import free_memory
from pyspac.engine.values import read_device_kind
from pyspac.errors import ConfigError

if TYPE_CHECKING:
    from pyspac.engine.engine import DeviceInfo

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
    has_cache: bool = True  # it may hold experts; False: there is no device beside the host

    @property
    def is_cpu(self) -> bool:
        return self.handle is None


def fits_memory(n_bytes: int) -> bool:
    """Whether so much may be copied out of a model's file; else it stays mapped."""
    return n_bytes < MEMORY_SHARE * free_memory()


def cpu_device(*, has_cache: bool = True) -> Device:
    """The CPU: as an emulated device, or (`has_cache` False) as all there is."""
    return Device(
        name="CPU", description="host", handle=None,
        memory_free=free_memory(), memory_total=int(psutil.virtual_memory().total), has_cache=has_cache,
    )  # fmt: skip


def gpu_devices() -> list[Device]:
    """All devices but the CPU, as ggml lists them."""
    from pyspac.engine import engine  # loads the native library

    return [_from_info(info) for info in engine.devices() if info.type in GPU_TYPES]


def _from_info(info: DeviceInfo) -> Device:
    return Device(
        name=info.name, description=info.description, handle=info.handle,
        memory_free=info.memory_free, memory_total=info.memory_total,
    )  # fmt: skip


def choose_device(name: str, rpc: str | None = None) -> Device:
    """The device that `name` means by the engine's rule ("auto": that of `rpc`, else the GPU, else none).

    Raises UsageError if there is none of that name, or if "auto" would have to choose: one is supported.
    """
    from pyspac.engine import engine  # loads the native library

    match read_device_kind(name):
        case "none":
            return cpu_device(has_cache=False)
        case "emulated":
            return cpu_device()
    n_before = engine.device_count() if rpc else 0
    if rpc:
        _add_rpc(rpc)
    index = engine.find_device(name, n_before)
    if index is None:
        return cpu_device(has_cache=False)
    info = engine.devices()[index]
    return _from_info(info) if info.type in GPU_TYPES else cpu_device()


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
