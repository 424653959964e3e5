"""Which device computes: a name from the command line in, a `Device` out.

Without a GPU there is none: the CPU computes everything. Where the device is emulated, the CPU is both sides
of the split. Either way nothing of a graphics card is touched.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from pyspac.engine.memory import free_memory
from pyspac.engine.values import read_device_kind
from pyspac.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from pyspac.engine.engine import DeviceInfo

RPC_TIMEOUT_S: Final = 5.0
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


def choose_device(names: str, rpc: str | None = None) -> Device:
    """What `names` mean by the engine's rule: "CUDA0", or "CUDA0,CUDA1" for several in one `Device`.

    "auto": those of the servers `rpc` ("HOST:PORT,HOST:PORT"), else the GPU, else none. Raises UsageError if
    there is none of that name, one is named twice, or "auto" would have to choose.
    """
    from pyspac.engine import engine  # loads the native library

    match read_device_kind(names):
        case "none":
            return cpu_device(has_cache=False)
        case "emulated":
            return cpu_device()
    of_servers = _add_servers(rpc) if rpc else []
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


def _add_servers(rpc: str) -> list[str]:
    """Register the devices of all servers; their names."""
    endpoints = [endpoint.strip() for endpoint in rpc.split(",")]
    places = [_place(endpoint) for endpoint in endpoints]
    if twice := next((e for i, e in enumerate(endpoints) if places[i] in places[:i]), None):
        # a server takes one client at a time: the second of our own connections would wait for the first
        raise UsageError(f"--rpc {rpc} names {twice} twice: name each server once")
    return [name for endpoint in endpoints for name in _add_rpc(endpoint)]


def servers_that_answer(rpc: str) -> list[str]:
    """Those of "HOST:PORT,HOST:PORT" which take a connection."""
    living = []
    for endpoint in rpc.split(","):
        host, _, port = endpoint.rpartition(":")
        with contextlib.suppress(OSError):
            _connect(host, int(port))
            living.append(endpoint)
    return living


def _place(endpoint: str) -> tuple[str, str]:
    """Address and port, the same for all ways to spell them; as it is if it is none."""
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError, UnicodeError):
        host = str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    return host, port.lstrip("0")


def _connect(host: str, port: int) -> None:
    socket.create_connection((host.strip("[]"), port), RPC_TIMEOUT_S).close()


_NAMES_OF: Final[dict[str, list[str]]] = {}  # devices of servers that were added: ggml keeps them


def _add_rpc(endpoint: str) -> list[str]:
    """Register the devices of `endpoint`; ggml aborts the process if it cannot connect, so try first."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("--rpc", endpoint, "HOST:PORT, such as 192.168.1.7:50052; several with commas")
    if endpoint in _NAMES_OF:  # it may serve this process just now, and take nobody else
        return _NAMES_OF[endpoint]
    try:
        _connect(host, int(port))
    except OSError as error:
        wanted = f"the address of a running ggml-rpc-server (connecting failed: {error})"
        raise ConfigError("--rpc", endpoint, wanted) from error
    from pyspac.engine import engine

    n_before = engine.device_count()
    engine.add_rpc(endpoint)
    _NAMES_OF[endpoint] = [info.name for info in engine.devices()[n_before:]]
    return _NAMES_OF[endpoint]
