"""Which device computes: a name from the command line in, a `Device` out.

Without a GPU there is none: the CPU computes everything. Where the device is emulated, the CPU is both sides
of the split. Either way nothing of a graphics card is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from pyspac.engine.memory import free_memory
from pyspac.engine.rpc_servers import add_servers
from pyspac.engine.values import read_device_kind

if TYPE_CHECKING:
    from pyspac.engine.engine import DeviceInfo

MEMORY_SHARE: Final = 0.8  # of what is free
GPU_TYPES: Final = (1, 2)  # enum ggml_backend_dev_type: GPU, integrated GPU; RPC devices are GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A ggml device, or several that share a model's layers; memory in bytes.

    The CPU has no handle: it is always there.
    """

    name: str
    description: str
    handle: int | None
    memory_free: int
    memory_total: int
    has_cache: bool = True  # it may hold experts; False: there is no device beside the host
    parts: tuple[Device, ...] = ()  # of several: each, in the order of their names

    @property
    def handles(self) -> tuple[int, ...]:
        """Of all but the CPU."""
        return tuple(part.handle for part in self.each if part.handle is not None)

    @property
    def each(self) -> tuple[Device, ...]:
        return self.parts or (self,)

    @property
    def is_cpu(self) -> bool:
        return not self.handles


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


def choose_device(names: str, rpc: str | None = None, *, is_split: bool = True) -> Device:
    """What `names` mean by the engine's rule: "CUDA0", or "CUDA0,CUDA1" for several in one `Device`.

    "auto": those of the servers `rpc` ("HOST:PORT,HOST:PORT"), else all GPUs, else none. `is_split`: servers
    have to be of this build, as experts may be elsewhere. Raises UsageError if there is no device of that
    name, or one is named twice, or a server does not fit, NoAnswerError if one is not there.
    """
    from pyspac.engine import engine  # loads the native library

    match read_device_kind(names):
        case "none":
            return cpu_device(has_cache=False)
        case "emulated":
            return cpu_device()
    of_servers = [] if rpc is None else add_servers(rpc, is_split=is_split)
    is_theirs = read_device_kind(names) == "auto" and of_servers
    indices = engine.find_devices(",".join(of_servers) if is_theirs else names)
    all_devices = engine.devices() if indices else []
    found = [_device_of(all_devices[index]) for index in indices]
    if len(found) > 1:
        return _together(found)
    return found[0] if found else cpu_device(has_cache=False)


def _device_of(info: DeviceInfo) -> Device:
    return _from_info(info) if info.type in GPU_TYPES else cpu_device()


def _together(parts: list[Device]) -> Device:
    return Device(
        name=",".join(part.name for part in parts),
        description=", ".join(part.description for part in parts),
        handle=None,
        memory_free=sum(part.memory_free for part in parts),
        memory_total=sum(part.memory_total for part in parts),
        parts=tuple(parts),
    )
