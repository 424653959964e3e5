"""The engine's handle in Python, and the board as numpy arrays, against the real library on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
from llama_helpers import Batch, Sequence0, decode, llama, loaded_model, new_context, split_layers

from pyspac._native import ffi, lib
from pyspac.engine import engine as native
from pyspac.engine.board import NO_BUDGET, Board, BoardGeometry, LocalBoard, Residency
from pyspac.engine.engine import Engine
from pyspac.engine.limits import MAX_BATCH, MAX_THREADS
from pyspac.engine.params import EngineParams
from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError, EngineError
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.routing_log import RoutingLog
from pyspac.scheduler.scheduler import Scheduler

N_STEPS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = gguf_models.write_model(tmp_path_factory.mktemp("model") / "qwen3moe.gguf", "qwen3moe")
    with loaded_model(path) as loaded:
        yield loaded


@pytest.fixture
def ctx(model: Any) -> Iterator[Any]:
    with new_context(model) as context:
        yield context


def attach(ctx: Any, **fields: Any) -> Engine:
    return Engine.attach(ctx, EngineParams(**{"device": "cpu", "cache": "50%", "fill": False, **fields}))


def test_arrays_have_the_shapes_and_types_of_the_list(ctx: Any) -> None:
    with attach(ctx) as engine:
        board = engine.board
        sizes = {name: getattr(lib, name) for name in dir(lib) if name.startswith("SPAC_N_")}
        sizes |= {name: getattr(board, name) for name in ("n_layer", "n_expert", "n_expert_used", "n_device")}
        for name, c_type, shape, _writer, meaning, array in board.fields():
            wanted = [eval(dim, {}, sizes) for dim in shape.strip("()").split(",")]  # "n_layer * n_expert"
            assert list(array.shape) == wanted, name
            assert array.dtype.itemsize == ffi.sizeof(c_type), name
            assert array.ctypes.data == getattr(board, name).ctypes.data
            assert meaning


@pytest.mark.parametrize(
    "struct", ["counters", "layer_stats", "tier", "threads", "devices", "ahead", "records"]
)
def test_structs_have_the_fields_of_the_c_ones(struct: str) -> None:
    board = LocalBoard(BoardGeometry.uniform(n_layer=1, n_expert=2, n_expert_used=1, n_slots=1))
    (c_type,) = (field.type for field in board.fields() if field.name == struct)
    dtype = getattr(board, struct).dtype
    fields = ffi.typeof(c_type).fields
    assert [name for name, _ in fields] == list(dtype.names)
    assert [field.offset for _, field in fields] == [dtype.fields[name][1] for name, _ in fields]
    assert all(ffi.sizeof(field.type) == dtype[name].itemsize for name, field in fields)
    numbers = {"n_hit": np.uint64, "is_direct": np.bool_, "copy_gb_s": np.float64, "n_draft": np.int32}
    assert all(dtype[name] == numbers.get(name, dtype[name]) for name in dtype.names)


def test_residency_has_the_values_of_the_c_enum() -> None:
    assert [int(r) for r in Residency] == [getattr(lib, f"SPAC_RESIDENCY_{r.name}") for r in Residency]


def test_info_and_board_agree(ctx: Any) -> None:
    with attach(ctx, max_batch=9) as engine:
        info, board = engine.info(), engine.board
        assert (info.n_layer, info.n_expert, info.n_slots) == (board.n_layer, board.n_expert, board.n_slots)
        assert info.is_emulated
        assert info.max_batch == board.max_batch == 9
        assert info.n_layer_split == np.count_nonzero(board.expert_bytes)
        assert len(engine.declined()) == info.n_layer_declined
        assert board.counts.shape == (info.n_layer, info.n_expert)
        assert int(board.byte_budget[0]) == NO_BUDGET


def test_engine_arrays_are_read_only(ctx: Any) -> None:
    with attach(ctx) as engine:
        may_write = {
            field.name for field in engine.board.fields() if getattr(engine.board, field.name).flags.writeable
        }
    schedulers = {"utility", "tau", "load", "n_load", "byte_budget", "want_whole", "n_draft_max",
                  "n_draft_matched"}  # fmt: skip
    assert may_write == schedulers | {"decision_seq", "looks_ahead", "fallback"}


def test_a_decision_is_carried_out(ctx: Any) -> None:
    with attach(ctx) as engine:
        board = engine.board
        il = int(np.flatnonzero(board.expert_bytes)[0])
        with board.decision():
            board.utility[il, 2] = 9
            board.tau[:] = 5
            board.load[0] = il * board.n_expert + 2
            board.n_load[0] = 1
        engine.apply()
        engine.wait_idle()
        assert board.residency[il, 2] == Residency.RESIDENT
        assert np.count_nonzero(board.residency) == 1
        assert engine.slot(il, 2) is not None
        assert engine.slot(il, 3) is None


def test_step_records_reach_the_board(ctx: Any) -> None:
    with attach(ctx) as engine:
        engine.record_step(StepRecord(n_draft=4, n_accepted=2, verify_us=900))
        assert int(engine.board.n_records[0]) == 1
        assert engine.board.records[0]["n_accepted"] == 2
        assert engine.board.records[0]["verify_us"] == 900


@pytest.mark.parametrize("estimator", ["ema", "spac"])
def test_scheduler_and_engine_together(ctx: Any, estimator: str) -> None:
    with attach(ctx) as engine:
        scheduler = Scheduler(engine.board, SchedulerConfig(estimator=estimator, n_draft_max=4))
        sequence = Sequence0(0, 200)
        for _ in range(N_STEPS):
            decode(ctx, sequence.next_batch(5))
            engine.end_forward()
            scheduler.step()
            assert scheduler.activity.n_tokens == 5
            engine.apply()
        engine.wait_idle()
        counters = engine.board.counters[0]
        assert counters["n_loads"] > 0
        assert counters["n_hit_rows"] > 0
        assert counters["n_pinned_steals"] == 0
        assert np.count_nonzero(engine.board.residency) <= engine.board.n_slots


def test_a_closed_engine_says_so(ctx: Any) -> None:
    engine = attach(ctx)
    board = engine.board
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.apply()
    with pytest.raises(EngineError, match="closed"):
        _ = board.counts
    with pytest.raises(EngineError, match="closed"), board.decision():
        pass


def test_a_dropped_engine_is_freed(ctx: Any) -> None:
    attach(ctx)
    with attach(ctx) as engine:  # the context takes one engine at a time
        assert engine.info().n_slots > 0


def test_bad_parameters_are_explained(ctx: Any) -> None:
    with pytest.raises(EngineError) as error:
        attach(ctx, cache="much")
    assert "much" in str(error.value)
    assert error.value.status == lib.SPAC_STATUS_INVALID_ARGUMENT
    assert error.value.exit_code == 2
    with pytest.raises(EngineError, match="nosuch"):
        attach(ctx, device="nosuch0")


@pytest.mark.parametrize(("field", "limit"), [("max_batch", MAX_BATCH), ("n_threads", MAX_THREADS)])
def test_limits_are_the_engines(ctx: Any, field: str, limit: int) -> None:
    """Python refuses what spac.h does not allow, and the engine refuses it by itself."""
    with pytest.raises(ConfigError, match=f"{field} cannot be {limit + 1}.*{limit}"):
        attach(ctx, **{field: limit + 1})
    params = ffi.new("spac_engine_params *", lib.spac_engine_default_params())
    setattr(params, field, limit + 1)
    out = ffi.new("spac_engine **")
    status = lib.spac_engine_attach(ffi.cast("struct llama_context *", ctx), params, out)
    assert status == lib.SPAC_STATUS_INVALID_ARGUMENT
    text = ffi.string(lib.spac_last_error()).decode()
    assert f"{field} cannot be {limit + 1}" in text
    assert str(limit) in text.partition(":")[2]
    with attach(ctx, **{field: limit}) as engine:
        assert engine.info().n_slots > 0


def test_a_board_opens_by_name(ctx: Any) -> None:
    name = f"pyspac-test-{os.getpid()}"
    with attach(ctx, board_name=name) as engine:
        with Board.open(name) as board:
            texts = Sequence0(0, 200)
            decode(ctx, texts.next_batch(3))
            engine.end_forward()  # a shared board shows a forward when it has ended
            assert np.array_equal(board.counts, engine.board.counts)
            assert int(board.counts.sum()) > 0
            n_before = int(board.counters["n_decisions"][0])
            with board.decision():
                board.tau[:] = 7
            engine.apply()
            engine.end_forward()
            decode(ctx, texts.next_batch(1))
            engine.end_forward()
            assert int(board.counters["n_decisions"][0]) == n_before + 1
        with pytest.raises(EngineError, match="closed"):
            _ = board.counts
    with pytest.raises(EngineError, match=name):
        Board.open(name)


def test_devices_and_buffer_type() -> None:
    assert any(device.name.upper().startswith("CPU") for device in native.devices())
    assert native.cpu_buffer_type() != 0


def test_a_missing_library_is_loud(tmp_path: Path) -> None:
    code = "import pyspac.engine.engine"
    env = {
        **os.environ,
        "PYSPAC_BUILD_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr


def test_the_routing_log_names_each_token_with_its_own_experts(model: Any) -> None:
    """llama.cpp orders the tokens of several sequences as suits it: ids and experts still belong together."""
    rng = np.random.default_rng(3)
    tokens = [int(token) for token in rng.permutation(200)[:12] + 3]
    with new_context(model, n_seq=3) as ctx, attach(ctx, max_batch=16) as engine:
        alone = {}
        for token in tokens:  # only the first position: a router sees nothing but the token
            log = RoutingLog(engine.board)
            llama.llama_memory_clear(llama.llama_get_memory(ctx), True)
            decode(ctx, Batch([token], [0], [0]))
            engine.end_forward()
            ids, experts = log.read()
            assert ids.tolist() == [token]
            alone[token] = experts[0]
        log = RoutingLog(engine.board)
        for first in range(0, 12, 3):
            llama.llama_memory_clear(llama.llama_get_memory(ctx), True)
            decode(ctx, Batch(tokens[first : first + 3], [0, 0, 0], [2, 0, 1]))
        engine.end_forward()
        ids, experts = log.read()
        assert sorted(ids.tolist()) == sorted(tokens)
        for token, used in zip(ids.tolist(), experts, strict=True):
            split = split_layers(engine)
            assert np.array_equal(np.sort(used[split]), np.sort(alone[token][split]))


def test_of_a_long_prompt_the_last_tokens_are_logged(model: Any) -> None:
    with new_context(model, n_ubatch=400, n_batch=400) as ctx, attach(ctx) as engine:
        log = RoutingLog(engine.board)
        batch = Sequence0(1, 250).next_batch(400)
        decode(ctx, batch)
        engine.end_forward()
        ids, experts = log.read()
        assert ids.tolist() == list(batch.tokens[-lib.SPAC_N_ROUTED_MAX :])
        assert experts[:, split_layers(engine)].max() < engine.board.n_expert


def test_embeddings_have_no_token_ids(model: Any) -> None:
    n_embd = llama.llama_model_n_embd(model)
    with new_context(model) as ctx, attach(ctx) as engine:
        log = RoutingLog(engine.board)
        decode(ctx, Batch([7], [0], [0]))
        batch = llama.llama_batch_init(2, n_embd, 1)
        batch.n_tokens = 2
        for i in range(2):
            batch.pos[i], batch.n_seq_id[i], batch.logits[i], batch.seq_id[i][0] = 1 + i, 1, 1, 0
            for k in range(n_embd):
                batch.embd[i * n_embd + k] = 0.01 * k
        status = llama.llama_decode(ctx, batch)
        llama.llama_batch_free(batch)
        assert status == 0
        decode(ctx, Batch([9], [3], [0]))
        engine.end_forward()
        ids, experts = log.read()
        assert ids.tolist() == [7, -1, -1, 9]
        assert experts[:, split_layers(engine)].max() < engine.board.n_expert
