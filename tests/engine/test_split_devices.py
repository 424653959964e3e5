"""Several devices in one context: each has the experts of the layers that llama.cpp gave it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from conftest import ROOT
from gguf import GGMLQuantizationType as Type
from llama_helpers import (
    Sequence0,
    assert_same_bits,
    attached_engine,
    decide_all,
    decide_randomly,
    decode,
    new_context,
    offloaded_model,
    place,
    shares,
    split_layers,
)

from pyspac._native import lib
from pyspac.engine import engine as native
from pyspac.engine.device_stats import read_devices
from pyspac.engine.params import EngineParams
from pyspac.errors import EngineError
from tools.rpc_servers import rpc_server

DEMO = ROOT / "pyspac" / "models" / "demo-moe.gguf"

WIDTHS = (40, *range(1, 17), 5, 1)


@contextmanager
def open_pair(
    path: Path,
    devices: list[Any],
    names: str,
    model_fields: dict[str, Any] | None = None,
    **engine_fields: Any,
) -> Iterator[tuple[Any, Any, native.Engine]]:
    """A stock context over these devices, one that is split, and its engine on the devices of `names`."""
    fields = {"device": names, "host_kernels": "ggml"} | engine_fields
    with (
        offloaded_model(path, *devices, **(model_fields or {})) as model,
        new_context(model) as stock,
        new_context(model) as split,
        attached_engine(split, **fields) as engine,
    ):
        yield stock, split, engine


def names_of(devices: list[Any]) -> str:
    return ",".join(device.name for device in devices)


def assert_stocks_logits(stock: Any, split: Any, engine: native.Engine, seed: int) -> None:
    """To the last bit, whatever is resident where: all sides run the same kernels."""
    tokens, rng = Sequence0(seed, models.N_VOCAB), np.random.default_rng(seed)
    for i, width in enumerate(WIDTHS):
        decide_randomly(engine, rng)
        if i % 2:  # else copies arrive while it decodes
            place(engine)
        batch = tokens.next_batch(width)
        assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")
    stats = engine.board.layer_stats[split_layers(engine)]
    assert (stats["n_device_rows"] > 0).all()
    assert (stats["n_host_rows"] > 0).all()
    assert engine.board.counters[0]["n_pinned_steals"] == 0


@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name != models.NOT_SPLIT])
def test_logits_over_two_servers_are_stocks(name: str, rpc_devices: list[Any], tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", name)
    moe_layers = models.ARCHITECTURES[name].moe_layers()
    # one server computes the first MoE layer and all before it, the other one those after it
    n_first = moe_layers[0] + 1
    split = shares(n_first, models.ARCHITECTURES[name].shape.n_layer + 1 - n_first)
    with open_pair(path, rpc_devices, names_of(rpc_devices), split) as (stock, split_ctx, engine):
        assert engine.info().host_mode == lib.SPAC_HOST_EXECUTOR
        assert engine.info().device == names_of(rpc_devices)
        assert split_layers(engine).tolist() == moe_layers
        assert engine.board.layer_device[moe_layers].tolist() == [0] + [1] * (len(moe_layers) - 1)
        assert_stocks_logits(stock, split_ctx, engine, seed=1)
        figures = read_devices(engine.board)
        assert [device.name for device in figures] == [device.name for device in rpc_devices]
        assert all(device.n_loads > 0 and 0 < device.coverage < 1 for device in figures)
        assert sum(device.n_loads for device in figures) == engine.board.counters[0]["n_loads"]


def test_the_order_of_the_names_decides_nothing_but_the_sizes(rpc_devices: list[Any], tmp_path: Path) -> None:
    """Layers are llama.cpp's to give; the first size is the first name's."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    names = names_of(rpc_devices[::-1])
    with open_pair(path, rpc_devices, names, shares(1, 1), cache="100%,25%") as (stock, split, engine):
        second, first = read_devices(engine.board)
        assert (first.name, second.name) == (rpc_devices[0].name, rpc_devices[1].name)
        n_expert = engine.board.n_expert
        assert second.n_slots == second.n_layers * n_expert
        assert first.n_slots == first.n_layers * n_expert // 4
        assert_stocks_logits_with_room(stock, split, engine)


def assert_stocks_logits_with_room(stock: Any, split: Any, engine: native.Engine) -> None:
    tokens = Sequence0(2, models.N_VOCAB)
    decide_all(engine)
    place(engine)
    for width in (1, 5, 16):
        batch = tokens.next_batch(width)
        assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")


def test_a_server_and_the_emulated_device(rpc_devices: list[Any], tmp_path: Path) -> None:
    """Layers that stay on the host have their slots there."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    server = rpc_devices[1:]
    fields = {"n_gpu_layers": 2}  # the output and the last layer
    with open_pair(path, server, f"{server[0].name},emulated", fields) as (stock, split, engine):
        assert engine.board.layer_device.tolist() == [1, 1, 0]
        assert engine.info().is_emulated
        assert [device.is_emulated for device in read_devices(engine.board)] == [False, True]
        assert_stocks_logits(stock, split, engine, seed=3)


def test_own_kernels_beside_both(rpc_devices: list[Any], tmp_path: Path) -> None:
    """Emulated, the device's experts are computed by them too; one type has none."""
    types = [Type.Q8_0, Type.F32, (Type.Q4_K, Type.Q4_K, Type.Q6_K)]
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe", types)
    names = f"{rpc_devices[0].name},emulated"
    with open_pair(path, rpc_devices[:1], names, {"n_gpu_layers": 2}, host_kernels="auto") as (
        stock,
        split,
        engine,
    ):
        if not engine.info().kernels:
            pytest.skip("no kernels for this processor")
        tokens, rng = Sequence0(5, models.N_VOCAB), np.random.default_rng(6)
        errors = []
        for width in (1, 5, 9, 16, 1, 2):
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            ours, theirs = decode(split, batch), decode(stock, batch)
            errors.append(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        assert np.median(errors) < 0.05, errors  # a router at a near tie may move one of them


@pytest.mark.parametrize(
    ("names", "cache", "why"),
    [
        ("{0},{0}", "50%", "names {0} twice"),
        ("{0},RPC77", "50%", 'no device "RPC77" here'),
        ("{0},none", "50%", "cannot be in a list"),
        ("{0},{1}", "50%,50%,50%", "has 3 sizes, and there are 2 devices"),
        ("{0},emulated", "50%", "gives CPU no MoE layer of this model"),
        ("auto", "50%,50%,50%", "has 3 sizes, and there are 2 devices"),
    ],
)
def test_what_does_not_fit_is_refused(
    names: str, cache: str, why: str, rpc_devices: list[Any], tmp_path: Path
) -> None:
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    both = [device.name for device in rpc_devices]
    with (
        pytest.raises(EngineError, match=why.format(*both)),
        open_pair(path, rpc_devices, names.format(*both), shares(1, 1), cache=cache),
    ):
        pass


def test_auto_is_all_of_the_context(rpc_devices: list[Any], tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with open_pair(path, rpc_devices, "auto", shares(1, 1), cache="50%") as (stock, split, engine):
        assert engine.info().device == names_of(rpc_devices)
        assert_stocks_logits(stock, split, engine, seed=4)


@pytest.mark.parametrize(("first", "left"), [(1, 0), (0, 1)])
def test_auto_leaves_out_what_has_no_moe_layer(
    first: int, left: int, rpc_devices: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sizes and links stay those of the devices that were asked for."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    fields = {"cache": "25%,50%", "device_copy_gb_s": (1.0, 2.0)}
    with open_pair(path, rpc_devices, "auto", shares(first, left), **fields) as (stock, split, engine):
        (one,) = read_devices(engine.board)
        assert one.name == engine.info().device == rpc_devices[left].name
        assert one.n_slots == one.n_layers * engine.board.n_expert * (1 + left) // 4
        assert engine.board.devices["copy_gb_s"].tolist() == [1.0 + left]
        assert_stocks_logits(stock, split, engine, seed=5)
    says = f"gives {rpc_devices[1 - left].name} no MoE layer of this model: it holds no experts"
    assert capfd.readouterr().err.count(says) == 1


def test_one_row_crosses_to_the_next_device() -> None:
    """The sum of a layer's experts, not their rows: the log has the inputs of a graph's parts."""
    with rpc_server() as first, rpc_server() as second:
        rpc = f"127.0.0.1:{first},127.0.0.1:{second}"
        options = [
            "--rpc",
            rpc,
            "-ts",
            "3,4",
            "--cache",
            "50%",
            "-p",
            "a",
            "-n",
            "2",
            "-v",
            "--log-verbosity",
            "5",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pyspac", "run", "-m", str(DEMO), *options],
            env=os.environ | {"GGML_SCHED_DEBUG": "1"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = [line for line in done.stderr.splitlines() if "SPLIT #" in line and f":{second}]" in line]
    assert not [line for line in parts if "[spac_collect-2" in line]  # of the first server's last layer
    assert [line for line in parts if "[l_out-2" in line]
    assert [line for line in parts if "[spac_collect-3" in line]


def test_links_of_their_own(rpc_devices: list[Any], tmp_path: Path) -> None:
    """Emulated, one of them a thousand times as slow as the other: neither waits for the other."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    slow_gb_s = 0.001
    fields = {"cache": "100%", "device_copy_gb_s": (1.0, slow_gb_s)}
    with open_pair(path, rpc_devices, names_of(rpc_devices), shares(1, 1), **fields) as (_, _, engine):
        assert engine.info().is_emulated
        decide_all(engine)
        place(engine)
        fast, slow = read_devices(engine.board)
        assert fast.is_emulated
        assert slow.n_loads > 0
        assert fast.link_gb_s is not None
        assert slow.link_gb_s is not None
        assert slow.link_gb_s <= slow_gb_s < fast.link_gb_s


def test_budgets_of_their_own(rpc_devices: list[Any], tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with open_pair(path, rpc_devices, names_of(rpc_devices), shares(1, 1), cache="100%") as (_, _, engine):
        board = engine.board
        decide_all(engine)
        with board.decision():
            board.byte_budget[:] = (0, 2 * int(board.expert_bytes[-1]))
        place(engine)
        engine.end_forward()
        none, two = read_devices(board)
        assert (none.n_loads, two.n_loads) == (0, 2)


def test_the_context_may_go_first(rpc_devices: list[Any], tmp_path: Path) -> None:
    """While both copy: nothing of the engine touches the weights or the devices then."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with offloaded_model(path, *rpc_devices, **shares(1, 1)) as model:
        params = EngineParams(
            device=names_of(rpc_devices), cache="100%", device_copy_gb_s=(0.001, 0.002), fill=False
        )
        with new_context(model) as ctx:
            engine = native.Engine.attach(ctx, params)
            decide_all(engine)
            engine.apply()
        engine.close()
