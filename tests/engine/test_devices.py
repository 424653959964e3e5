"""The choice of a device where there is no GPU; engine/tests/test-engine-params.cpp has the others."""

from __future__ import annotations

import pytest

from pyspac.engine.devices import choose_device, gpu_devices
from pyspac.errors import UsageError


@pytest.fixture(autouse=True)
def no_gpu() -> None:
    if gpu_devices():
        pytest.skip("this machine has a GPU")


@pytest.mark.parametrize("name", ["auto", "AUTO", "none", "None"])
def test_without_a_gpu_there_is_no_device(name: str) -> None:
    device = choose_device(name)
    assert device.is_cpu
    assert not device.has_cache


@pytest.mark.parametrize("name", ["emulated", "cpu", "CPU"])
def test_the_emulated_device_is_asked_for_by_name(name: str) -> None:
    device = choose_device(name)
    assert device.is_cpu
    assert device.has_cache


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(UsageError, match='there is no device "CUDA0" here: give auto, none or emulated'):
        choose_device("CUDA0")
