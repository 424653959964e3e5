"""The choice of a device, with GPUs that are not there."""

from __future__ import annotations

import pytest

from pyspac.engine import devices
from pyspac.engine.devices import Device, choose_device
from pyspac.errors import ConfigError


def gpu(name: str) -> Device:
    return Device(name=name, description="", handle=1, memory_free=1 << 30, memory_total=1 << 30)


def give(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(devices, "gpu_devices", lambda: [gpu(name) for name in names])


def test_auto_takes_the_only_gpu_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, "CUDA0")
    assert choose_device("auto").name == "CUDA0"
    give(monkeypatch)
    assert choose_device("auto").is_cpu


def test_one_of_several_gpus_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, "CUDA0", "CUDA1")
    with pytest.raises(ConfigError, match="one of CUDA0, CUDA1"):
        choose_device("auto")
    assert choose_device("cuda1").name == "CUDA1"
    assert choose_device("cpu").is_cpu


def test_the_device_of_an_rpc_server_comes_before_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, "CUDA0")
    monkeypatch.setattr(devices, "_add_rpc", lambda endpoint: give(monkeypatch, "CUDA0", "RPC0"))
    assert choose_device("auto", "localhost:1").name == "RPC0"
