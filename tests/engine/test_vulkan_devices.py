"""Two Vulkan devices: GPUs, or lavapipe twice (tools/vulkan); and one beside an RPC server."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from conftest import ROOT
from llama_helpers import (
    Sequence0,
    attached_engine,
    decide_all,
    decide_randomly,
    decode,
    loaded_model,
    new_context,
    offloaded_model,
    place,
    shares,
)

from pyspac.engine import engine as native
from pyspac.engine.device_stats import read_devices
from pyspac.engine.devices import choose_device, gpu_devices
from pyspac.engine.params import EngineParams
from pyspac.engine.step import StepRecord
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import ALL_LAYERS, LOAD_MODE_NONE, Model, ModelParams
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.forward.split import Split
from tools.rpc_servers import rpc_server

MODEL = ROOT / "pyspac" / "models" / "demo-moe.gguf"
PROMPT = "def parse_args(argv):"
EQUAL_SHARES = ("-ts", "3,4")  # of the demo's six layers and its output
WIDTHS = (1, 5, 9, 2, 16, 1)  # 9 and 16 are beyond the vector shaders

pytestmark = pytest.mark.vulkan


def vulkan_devices(n: int) -> list[Any]:
    found = [device for device in gpu_devices() if device.name.startswith("Vulkan")]
    if len(found) < n:
        pytest.skip("one Vulkan device")
    return found[:n]


@pytest.fixture(params=["two of Vulkan", "Vulkan beside RPC"])
def pair(request: pytest.FixtureRequest) -> list[Any]:
    if request.param == "two of Vulkan":
        return vulkan_devices(2)
    servers: list[Any] = request.getfixturevalue("rpc_devices")
    return [*vulkan_devices(1), servers[0]]


def names_of(devices: list[Any]) -> str:
    return ",".join(device.name for device in devices)


@contextmanager
def open_pair(path: Path, devices: list[Any], **engine_fields: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A context of stock with all of the model on these devices, one that is split, and its engine."""
    handles = (ctypes.c_void_p * (len(devices) + 1))(*(device.handle for device in devices), None)
    split_layers = shares(2, 2) if len(devices) > 1 else {}  # of three layers and the output
    on_devices = {"n_gpu_layers": 99, "devices": ctypes.addressof(handles)} | split_layers
    with (
        loaded_model(path, **on_devices) as whole,
        offloaded_model(path, *devices, **split_layers) as model,
        new_context(whole) as stock,
        new_context(model) as split,
        attached_engine(split, device=names_of(devices), **engine_fields) as engine,
    ):
        yield stock, split, engine


def assert_near(split: np.ndarray, stock: np.ndarray, error: float, where: str) -> None:
    assert stock.std() > 0.01, where
    assert np.linalg.norm(split - stock) < error * np.linalg.norm(stock), where


def test_logits_are_stocks_where_all_experts_are_resident(pair: list[Any], tmp_path: Path) -> None:
    """No expert is computed on the host, whose kernels differ; what ggml-vulkan fuses rounds otherwise."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe", models.MIXED_TYPES)
    with open_pair(path, pair, cache="100%") as (stock, split, engine):
        decide_all(engine)
        place(engine)
        tokens = Sequence0(1, models.N_VOCAB)
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            assert_near(decode(split, batch), decode(stock, batch), 1e-5, f"{width} tokens")
        figures = read_devices(engine.board)
        assert [device.name for device in figures] == [device.name for device in pair]
        assert all(device.n_device_rows > 0 and device.n_host_rows == 0 for device in figures)


def test_logits_while_both_copy(pair: list[Any], tmp_path: Path) -> None:
    """Experts come and go on both sides; near stock's as the kernels of two devices are."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe", models.MIXED_TYPES)
    with open_pair(path, pair, cache="50%,25%") as (stock, split, engine):
        tokens, rng = Sequence0(2, models.N_VOCAB), np.random.default_rng(3)
        for width in WIDTHS * 2:
            decide_randomly(engine, rng)
            batch = tokens.next_batch(width)
            assert_near(decode(split, batch), decode(stock, batch), 0.05, f"{width} tokens")
        n_expert = engine.board.n_expert
        first, second = read_devices(engine.board)
        assert (first.n_slots, second.n_slots) == (
            first.n_layers * n_expert // 2,
            second.n_layers * n_expert // 4,
        )
        assert all(
            min(device.n_loads, device.n_device_rows, device.n_host_rows) > 0 for device in (first, second)
        )
        assert engine.board.counters[0]["n_load_failures"] == 0
        assert engine.board.counters[0]["n_pinned_steals"] == 0


def run_json(*arguments: str | Path) -> dict[str, Any]:
    """`pyspac run --json` of the demo model."""
    options = ["-m", MODEL, "-p", PROMPT, "--temp", "0", *arguments, "--json", "-"]
    command = [sys.executable, "-m", "pyspac", "run", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("other", ["Vulkan1", "RPC0"])
def test_the_text_is_stocks_over_the_same_devices(other: str) -> None:
    """Each with its own share of the experts; the links are emulated, and each worker keeps to its own."""
    vulkan_devices(2 if other == "Vulkan1" else 1)
    with rpc_server() as port:
        devices = ["--device", f"Vulkan0,{other}", *EQUAL_SHARES, "-n", "12"]
        if other == "RPC0":
            devices += ["--rpc", f"127.0.0.1:{port}"]
        split = run_json(*devices, "--cache", "50%,25%", "--policy", "copy_gb_s=[1,0.002]")
        assert split["token_ids"] == run_json(*devices, "--stock")["token_ids"]
    fast, slow = split["devices"]
    assert [fast["name"], slow["name"]] == ["Vulkan0", other]
    assert (fast["n_layers"], fast["n_slots"], slow["n_layers"], slow["n_slots"]) == (3, 48, 3, 24)
    assert 0 < slow["n_loads"] < fast["n_loads"]
    assert slow["link_gb_s"] <= 0.002 < fast["link_gb_s"]


def test_a_slow_link_is_granted_less(pair: list[Any]) -> None:
    """As the links are measured, while experts are copied over both."""
    device = choose_device(names_of(pair))

    class SlowLink(ForwardOptions):
        def engine_params(self, device: str, ram_bytes: int | None = None) -> EngineParams:
            params = ForwardOptions.engine_params(self, device, ram_bytes)
            return replace(params, device_copy_gb_s=(1.0, 0.002))

    options = SlowLink(model=MODEL, device=device.name, cache=CacheSize(text="25%"), n_threads=2)
    params = ModelParams(
        path=MODEL,
        n_gpu_layers=ALL_LAYERS,
        devices=device.handles,
        buft=native.cpu_buffer_type(),
        use_extra_bufts=False,
        load_mode=LOAD_MODE_NONE,
    )
    with (
        Model(params) as model,
        Context(model, ContextParams(n_ctx=128, n_outputs_max=1, n_threads=2)) as context,
        Split(context.ptr, device, options) as split,
    ):
        context.decode(list(range(300, 310)), 1)
        split.after_prompt()
        for i in range(12):
            context.decode([400 + i], 1)
            split.after_step(StepRecord(step=i, n_draft=0, n_accepted=0, n_tokens=1))
        fast, slow = split.engine.board.byte_budget.tolist()
        assert slow < fast / 10
        assert all(figures.n_loads > 0 for figures in read_devices(split.engine.board))
