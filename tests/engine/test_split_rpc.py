"""The split over a second device, llama.cpp's own RPC server, with host experts on the engine's threads."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_helpers import (
    Sequence0,
    assert_same_bits,
    attached_engine,
    decide_randomly,
    decode,
    in_new_thread,
    n_os_threads,
    new_context,
    offloaded_model,
    place,
    split_layers,
)

from pyspac._native import lib
from pyspac.engine import engine as native
from tools.rpc_servers import rpc_server

TARGET = Path(__file__).resolve().parents[2] / "pyspac" / "models" / "demo-moe.gguf"


@pytest.fixture
def rpc_device(rpc_devices: list[Any]) -> Any:
    return rpc_devices[0]


def pass_on(source: socket.socket, to: socket.socket, first_patch: int | None = None) -> None:
    """Pass bytes on until one side ends, or resets; the first answer's patch level is replaced."""
    with contextlib.suppress(OSError):
        if first_patch is not None:  # u64 size, then major, minor and patch of the protocol's version
            to.sendall(source.recv(11, socket.MSG_WAITALL)[:10] + bytes([first_patch]))
        while data := source.recv(1 << 16):
            to.sendall(data)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_RDWR)  # the server takes one client at a time


@contextmanager
def seen_as_stock(server_port: int) -> Iterator[int]:
    """The port of a relay to our server that says it is llama.cpp's own, of the same protocol."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(("127.0.0.1", server_port))
                    threading.Thread(target=pass_on, args=(client, server), daemon=True).start()
                    threading.Thread(target=pass_on, args=(server, client, 0), daemon=True).start()

        threading.Thread(target=relay, daemon=True).start()
        yield int(listener.getsockname()[1])


def run_over(port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyspac", "run", "-m", str(TARGET), "-p", "a", "-n", "2"]
    rpc = ["--rpc", f"127.0.0.1:{port}"]
    return subprocess.run([*command, *arguments, *rpc], capture_output=True, text=True, timeout=120)


def test_a_server_of_another_build_is_refused() -> None:
    """Before anything is computed there: the first absent expert would end such a server, and us."""
    with rpc_server() as port:
        with seen_as_stock(port) as relay_port:
            refused = run_over(relay_port, "--cache", "25%")
            stock = run_over(relay_port, "--stock")
        assert refused.returncode == 2
        assert "is not of this build" in refused.stderr
        assert stock.returncode == 0, stock.stderr
        ours = run_over(port, "--cache", "25%")
        assert ours.returncode == 0, ours.stderr


@contextmanager
def open_pair(path: Path, device: Any, **engine_fields: Any) -> Iterator[tuple[Any, Any, native.Engine]]:
    """A stock context, a split one with an engine on `device` (and ggml's kernels), and the engine."""
    fields = {"device": device.name, "host_kernels": "ggml"} | engine_fields
    with (
        offloaded_model(path, device) as model,
        new_context(model) as stock,
        new_context(model) as split,
        attached_engine(split, **fields) as engine,
    ):
        yield stock, split, engine


@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name != models.NOT_SPLIT])
def test_logits_are_stocks(name: str, rpc_device: Any, tmp_path: Path) -> None:
    """To the last bit: the server and the host run the same kernels."""
    path = models.write_model(tmp_path / "model.gguf", name)
    with open_pair(path, rpc_device) as (stock, split, engine):
        assert engine.info().host_mode == lib.SPAC_HOST_EXECUTOR
        assert engine.info().device == rpc_device.name
        assert engine.declined() == {}
        assert split_layers(engine).tolist() == models.ARCHITECTURES[name].moe_layers()
        tokens, rng = Sequence0(1, models.N_VOCAB), np.random.default_rng(2)
        for width in (40, 1, 2, 5, 9, 16, 1, 5, 9):
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")
        stats = engine.board.layer_stats[split_layers(engine)]
        assert (stats["n_device_rows"] > 0).all()
        assert (stats["n_host_rows"] > 0).all()
        assert engine.board.counters[0]["n_pinned_steals"] == 0


def test_experts_arrive_while_decoding(rpc_device: Any, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with open_pair(path, rpc_device, cache="30%") as (stock, split, engine):
        tokens, rng = Sequence0(3, models.N_VOCAB), np.random.default_rng(4)
        for i in range(30):
            decide_randomly(engine, rng)
            batch = tokens.next_batch((1, 5, 9)[i % 3])
            assert_same_bits(decode(split, batch), decode(stock, batch), f"batch {i}")
        counters = engine.board.counters[0]
        assert counters["n_loads"] > 10
        assert counters["n_load_failures"] == 0
        assert counters["n_hit_rows"] > 0


def test_own_kernels_are_the_default_beside_a_device(rpc_device: Any, tmp_path: Path) -> None:
    """For the layers that they can compute; ggml's for the one with F32."""
    types = [Type.Q8_0, (Type.Q4_K, Type.Q4_K, Type.Q6_K), Type.F32]
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe", types)
    with open_pair(path, rpc_device, host_kernels="auto") as (stock, split, engine):
        info = engine.info()
        if not info.kernels:
            pytest.skip("no kernels for this processor")
        assert info.n_layer_split == 3
        assert info.n_layer_kernels == 2
        tokens, rng = Sequence0(5, models.N_VOCAB), np.random.default_rng(6)
        for width in (1, 5, 9, 16, 1, 2):
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            ours, theirs = decode(split, batch), decode(stock, batch)
            assert np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs), f"{width} tokens"


def test_team_of_the_prompt_is_gone_while_ggml_computes_host_experts(rpc_device: Any, tmp_path: Path) -> None:
    """OpenMP throttles all teams of a process when they have more threads than there are cores."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with (
        offloaded_model(path, rpc_device) as model,
        new_context(model, n_threads=4) as ctx,
        attached_engine(ctx, device=rpc_device.name, host_kernels="ggml", n_threads=1),
    ):
        tokens = Sequence0(7, models.N_VOCAB)

        def decode_and_count() -> None:
            decode(ctx, tokens.next_batch(1))
            before = n_os_threads()
            decode(ctx, tokens.next_batch(40))
            assert n_os_threads() == before + 3
            decode(ctx, tokens.next_batch(5))
            assert n_os_threads() == before

        in_new_thread(decode_and_count)
