"""What all tests share: the folders of the checkout and of the build, and the markers' conditions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# hundreds of programs that tests start find pyspac compiled: half of what importing it costs
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

BACKENDS = {"gpu": "CUDA", "vulkan": "Vulkan"}  # by the marker of the tests that need one of its devices


@cache
def has_device(backend: str) -> bool:
    """A device that ggml lists: of a build with this backend, or of the one that GGML_BACKEND_PATH names."""
    from pyspac.engine.devices import gpu_devices

    return any(device.name.startswith(backend) for device in gpu_devices())


def needs_rpc(item: pytest.Item) -> bool:
    return "rpc_devices" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU say so when they are skipped. Everything else is there after `make build`.

    The RPC tests come last: ggml keeps their device when its server is gone, and aborts whoever asks for it.
    So do the other tests of their files, which stay whole where two processes share all files.
    """
    files = {item.path for item in items if needs_rpc(item)}
    # stable: the others stay as they are
    items.sort(key=lambda item: (item.path in files, needs_rpc(item)))
    for item in items:
        for marker, backend in BACKENDS.items():
            if item.get_closest_marker(marker) and not has_device(backend):
                item.add_marker(pytest.mark.skip(reason=f"no {backend} device"))


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """The build that pyspac uses, such as build/cpu; its bin/ holds libraries and programs."""
    from pyspac import _native

    return _native.lib_dir().parent


@pytest.fixture(scope="session")
def bin_dir() -> Path:
    """Folder of llama-server, llama-quantize and the others."""
    from pyspac import _native

    return _native.bin_dir()


@pytest.fixture(scope="session")
def rpc_devices() -> Iterator[list[Any]]:
    """The devices of two fresh RPC servers on this machine, for the rest of the process."""
    from pyspac.engine import engine as native
    from tools.rpc_servers import rpc_server

    with ExitStack() as stack:
        before = native.device_count()
        for _ in range(2):
            native.add_rpc(f"127.0.0.1:{stack.enter_context(rpc_server())}")
        yield native.devices()[before:]


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """SIGINT as a program in a terminal has it; a background job ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def hears_hangup() -> Iterator[None]:
    """SIGHUP as well, which `nohup` has its children ignore."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
