"""What this machine offers and what is wrong with it: a list of `Finding`s, each with a way to mend it.

The checks are independent: where the native library is missing, the others still run.
"""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import psutil

import pyspac
from pyspac.commands.saved_defaults import all_saved
from pyspac.commands.tier_view import disk_text
from pyspac.engine.memory import free_memory
from pyspac.errors import PyspacError
from pyspac.model.disk_probe import measure_disk
from pyspac.server.build_extras import MEND_HTTPS, MEND_UI, BuildExtras, build_extras
from pyspac.units import GIB

Level = Literal["ok", "note", "problem"]

LLAMA_CPP_PYTHON_VERSION: Final = (
    "0.3.36"  # vendors the pinned llama.cpp; its structs are those of our libllama
)
LOW_MEMORY_BYTES: Final = 2 * GIB
_NO_KERNELS: Final = "nothing: llama.cpp's compute, slower than on x86-64 with AVX2 or 64-bit ARM"
_AS_SAID: Final = "do as the message says, then run pyspac doctor again"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact; `mend` says what to do about a problem or a note."""

    level: Level
    what: str
    detail: str
    mend: str = ""


def examine(n_threads: int, model: Path, servers: Sequence[str] = ()) -> list[Finding]:
    """All checks, in the order of a reader's interest. Measuring, also of `model`'s disk, takes seconds.

    `servers`: HOST:PORT of RPC servers; their devices are looked at as those of the machine are.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "bindings": _bindings,
        "engine": _engine,
        "memory": _memory,
        "RPC servers": lambda: _servers(servers),
        "devices": _devices,
        "bandwidth": lambda: _bandwidths(n_threads),
        "disk": lambda: _disk(model),
        "defaults": _defaults,
    }
    return [finding for name, check in checks.items() for finding in _guarded(name, check)]


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of one check; its failure is a finding too."""
    findings: list[Finding] = []
    try:
        findings += check()
    except PyspacError as error:
        findings.append(Finding("problem", name, str(error), _AS_SAID))
    return findings


def to_dict(findings: list[Finding]) -> dict[str, Any]:
    """For `--json`."""
    return {"ok": not has_problem(findings), "findings": [asdict(finding) for finding in findings]}


def has_problem(findings: list[Finding]) -> bool:
    return any(finding.level == "problem" for finding in findings)


def _versions() -> Iterator[Finding]:
    yield Finding(
        "ok", "pyspac", f"{pyspac.__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    names = ("numpy", "cffi", "gguf", "typer", "rich")
    yield Finding("ok", "packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in names))
    if sys.platform != "linux":
        yield Finding("note", "system", f"{sys.platform} is not tested", "use Linux, or report what you see")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _bindings() -> Iterator[Finding]:
    found = _version("llama-cpp-python")
    if found is not None and found.partition("+")[0] == LLAMA_CPP_PYTHON_VERSION:  # "+...": of our own wheel
        yield Finding("ok", "bindings", f"llama-cpp-python {found}")
        return
    yield Finding(
        "problem",
        "bindings",
        f"llama-cpp-python is {found or 'missing'}, {LLAMA_CPP_PYTHON_VERSION} is needed",
        "CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install --no-binary llama-cpp-python "
        f"llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}",
    )


def _engine() -> Iterator[Finding]:
    """The libraries, and what they were built with."""
    from pyspac import _native
    from pyspac.engine.engine import kernels_name
    from pyspac.forward.libllama import lib

    yield Finding("ok", "engine", f"libspac and libllama from {_native.lib_dir()}")
    yield Finding("ok", "built with", _enabled_features(lib.llama_print_system_info().decode()))
    yield from _server(build_extras(_native.bin_dir()))
    if name := kernels_name():
        yield Finding("ok", "kernels", f"{name}: the engine's own, for what the CPU computes")
    else:
        yield Finding("note", "kernels", "none of the engine's own for this processor", _NO_KERNELS)


def _server(extras: BuildExtras) -> Iterator[Finding]:
    """What llama-server has that not every build has."""
    if extras.https:
        yield Finding("ok", "downloads", "-hf USER/MODEL: llama-server has HTTPS")
    else:
        yield Finding("note", "downloads", "no -hf: llama-server was built without HTTPS", MEND_HTTPS)
    if extras.ui:
        yield Finding("ok", "web page", "llama-server has its web page")
    else:
        yield Finding("note", "web page", "llama-server was built without its web page", MEND_UI)


def _enabled_features(system_info: str) -> str:
    """ "CPU : AVX = 1 | AVX512 = 0 |" -> "AVX"."""
    flags = [part.split("=") for part in system_info.replace("CPU :", "").split("|") if "=" in part]
    return " ".join(name.strip() for name, value in flags if value.strip() != "0")


def _memory() -> Iterator[Finding]:
    free, total = free_memory(), psutil.virtual_memory().total
    cores = f"{psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads"
    yield Finding("ok", "host", f"{cores}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    if free < LOW_MEMORY_BYTES:
        yield Finding(
            "problem",
            "memory",
            f"only {free / GIB:.1f} GiB free",
            "all experts stay in host memory: close other programs, take a smaller model, or keep experts on "
            "disk: --ram",
        )


def _servers(servers: Sequence[str]) -> Iterator[Finding]:
    """Those that fit are added to the devices."""
    from pyspac.engine.devices import choose_device
    from pyspac.engine.rpc import greet

    good = []
    for endpoint in servers:
        try:
            found = greet(endpoint)
            found.check_can_skip()
        except PyspacError as error:
            yield Finding("problem", "RPC server", str(error), _AS_SAID)
            continue
        good.append(endpoint)
        answer = f"protocol {found.version}, answers after {1e3 * found.seconds:.1f} ms"
        yield Finding("ok", "RPC server", f"{endpoint}: {answer}")
    if good:
        choose_device("auto", ",".join(good))


def _devices() -> Iterator[Finding]:
    from pyspac.engine.devices import gpu_devices

    devices = gpu_devices()
    for device in devices:
        memory = f"{device.memory_free / GIB:.1f} of {device.memory_total / GIB:.1f} GiB free"
        yield Finding("ok", "device", f"{device.name}: {device.description}, {memory}")
    if not devices:
        yield Finding(
            "note",
            "device",
            "no GPU: the CPU computes everything (--device none)",
            "if this machine has one, build with nvcc or glslc; or use another machine's: --rpc HOST:PORT",
        )


def _bandwidths(n_threads: int) -> Iterator[Finding]:
    from pyspac.engine import engine
    from pyspac.engine.devices import GPU_TYPES

    yield Finding(
        "ok", "host memory", f"{engine.measure_host_gb_s(n_threads):.1f} GB/s read, {n_threads} threads"
    )
    for device in engine.devices():
        if device.type in GPU_TYPES:
            source = "pinned" if device.has_pinned else "ordinary"
            speed = f"{engine.measure_link_gb_s(device.name):.1f} GB/s to {device.name}"
            yield Finding("ok", "link", f"{speed}, from {source} memory")


def _disk(model: Path) -> Iterator[Finding]:
    """Where experts of a model larger than memory would stay."""
    disk = measure_disk(model)
    yield Finding("ok", "disk", f"{disk_text(disk)}; read from {model}")
    if not disk.is_direct:
        yield Finding(
            "note",
            "O_DIRECT",
            f"the file system of {model} cannot read around the page cache: with --ram experts are read "
            "through it, and dropped from it after each read",
            "put the model on ext4, xfs, btrfs or another local file system, if it is larger than memory",
        )


def _defaults() -> Iterator[Finding]:
    """What `run` and `chat` do on their own differs for these models."""
    for path, saved in all_saved():
        if saved is None:
            text, mend = f"{path} cannot be read, so it is not used", f"rm {shlex.quote(str(path))}"
        else:
            text = f"{saved['model']}: run and chat take {saved['flags']}, as pyspac bench --profile saved it"
            forget = f"pyspac bench --forget -m {shlex.quote(saved['model'])}"
            mend = f"nothing, if that is wanted; else {forget}"
        yield Finding("note", "defaults", text, mend)
