"""Which device llama.cpp gives each layer to: worked out here, and seen there."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from llama_helpers import attached_engine, new_context, offloaded_model, split_layers

from pyspac.errors import ConfigError
from pyspac.model.layer_shares import device_of_layers
from pyspac.model.tensor_split import parse_tensor_split


@pytest.mark.parametrize(
    ("shares", "n_layer", "n_gpu_layers", "devices"),
    [
        ((1.0,), 3, None, [0, 0, 0]),
        ((1.0, 1.0), 3, None, [0, 0, 1]),  # with the output two layers each
        ((3.0, 4.0), 6, None, [0, 0, 0, 1, 1, 1]),
        ((0.0, 1.0), 3, None, [1, 1, 1]),
        ((1.0, 0.0), 3, None, [0, 0, 0]),
        ((1.0, 1.0), 3, 0, [None, None, None]),
        ((1.0, 1.0), 3, 1, [None, None, None]),  # the output
        ((1.0, 1.0), 3, 2, [None, None, 0]),
        ((1.0, 1.0), 3, 99, [0, 0, 1]),
        ((1.0, 1.0), 3, -1, [0, 0, 1]),
        ((1.0, 2.0, 1.0), 7, None, [0, 0, 1, 1, 1, 1, 2]),
    ],
)
def test_layers_of_devices(
    shares: tuple[float, ...], n_layer: int, n_gpu_layers: int | None, devices: list[int | None]
) -> None:
    assert device_of_layers(shares, n_layer, n_gpu_layers) == devices


def test_they_are_llama_cpps(rpc_devices: list[Any], tmp_path: Path) -> None:
    """Of random shares and numbers of layers, as the engine sees its layers; the host's are the CPU's.

    The engine is given those devices that have a layer: others it would refuse.
    """
    path, rng = models.write_model(tmp_path / "model.gguf", "qwen3moe", n_layer=7), np.random.default_rng(1)
    kinds = set()
    for n_gpu_layers in (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -1):
        shares = rng.choice([0.1, 0.3, 1.0, 2.0, 3.0, 7.0], 2)
        expected = device_of_layers(shares.tolist(), 7, n_gpu_layers)
        used = sorted(set(expected), key=lambda i: len(rpc_devices) if i is None else i)
        kinds.add(tuple(used))
        names = ["emulated" if i is None else rpc_devices[i].name for i in used]
        array = (ctypes.c_float * 16)(*shares)
        fields = {"tensor_split": ctypes.cast(array, ctypes.POINTER(ctypes.c_float))}
        with (
            offloaded_model(path, *rpc_devices, n_gpu_layers=n_gpu_layers, **fields) as model,
            new_context(model) as ctx,
            attached_engine(ctx, device=",".join(names), cache="25%") as engine,
        ):
            found = engine.board.layer_device[split_layers(engine)].tolist()
        assert [used[i] for i in found] == expected, (shares, n_gpu_layers)
    assert kinds >= {(0, 1), (0, 1, None), (None,)}


@pytest.mark.parametrize(
    "text", ["0", "0,0", "1,x", "1,", ",", "-1,2", "nan,1", "inf,1", "1 2", "1;2", "1_0,10", "١,1"]
)
def test_what_are_no_shares(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-split cannot be .*: give a share of the layers"):
        parse_tensor_split(text)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", ["1e39,1e39", "1e39,1", "3e38,3e38", "1e-46,1e-46", "1e-46"])
def test_what_are_no_shares_in_32_bits(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--tensor-split cannot be .*32-bit floats, and there the sum of these is 0 or not finite",
    ):
        parse_tensor_split(text)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", ["1e38,1e38", "1e-38,1e-38", "1e-46,1"])
def test_shares_at_the_ends_of_32_bits(text: str) -> None:
    shares = parse_tensor_split(text)
    assert None not in device_of_layers(shares, 3)


@pytest.mark.parametrize(
    ("text", "shares"), [("", ()), ("3,1", (3, 1)), ("3/1", (3, 1)), ("0,.5", (0, 0.5)), ("1e-1", (0.1,))]
)
def test_shares(text: str, shares: tuple[float, ...]) -> None:
    assert all(map(math.isclose, parse_tensor_split(text), shares))
    assert len(parse_tensor_split(text)) == len(shares)
