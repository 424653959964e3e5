"""Ranges of cores: what the engine refuses, and where the threads of an engine and of a run may then run."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import gguf_models as models
import pytest
from llama_helpers import Sequence0, attached_engine, decode, loaded_model, new_context
from serving import Serve, complete

from pyspac.engine.cpus import kept_within
from pyspac.errors import EngineError
from pyspac.server.arguments import n_threads
from pyspac.server.options import ServeOptions

DEMO = Path(__file__).resolve().parents[2] / "pyspac/models/demo-moe.gguf"
OPEN = os.sched_getaffinity(0)

two_cores = pytest.mark.skipif(not {0, 1} <= OPEN, reason="needs cores 0 and 1")


def cores_of_threads(pid: int | str = "self") -> dict[str, str]:
    """Of every thread of a process: where it may run, as in "0-1"."""
    files = {task.name: task / "status" for task in Path(f"/proc/{pid}/task").iterdir()}
    return {
        name: next(line.split()[1] for line in file.read_text().splitlines() if "allowed_list" in line)
        for name, file in files.items()
    }


@two_cores
def test_a_thread_returns_to_all_its_cores() -> None:
    before = os.sched_getaffinity(0)
    with kept_within({1}):
        assert os.sched_getaffinity(0) == {1}
    assert os.sched_getaffinity(0) == before


# three threads; the first core is also the caller's, which waits, so spac's own begin with the second
CORES = {"spac": {"1": 2, "0": 1}, "ggml": {"0": 2, "1": 1}}


@two_cores
@pytest.mark.parametrize("host_kernels", CORES)
def test_each_thread_of_the_host_has_one_core(host_kernels: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"host_mode": "executor", "n_threads": 3, "cpu_range": "0-1"}
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with loaded_model(path) as model, new_context(model) as ctx:
        before, mine = cores_of_threads(), os.sched_getaffinity(0)
        with attached_engine(ctx, host_kernels=host_kernels, **fields):
            decode(ctx, Sequence0(1, models.N_VOCAB).next_batch(2))  # ggml makes its threads for a graph
            after = cores_of_threads()
    pinned = Counter(after[name] for name in after.keys() - before.keys() if after[name] in ("0", "1"))
    assert pinned == CORES[host_kernels]
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize("text", ["", "0", "1-0", f"0-{max(OPEN) + 1}"])
def test_the_engine_refuses_what_it_cannot_obey(text: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with (
        loaded_model(path) as model,
        new_context(model) as ctx,
        pytest.raises(EngineError, match=f'cpu range cannot be "{text}"'),
        attached_engine(ctx, cpu_range=text),
    ):
        pass


def test_as_many_threads_as_cores() -> None:
    assert n_threads(ServeOptions(model=DEMO, cpu_range="1-1")) == 1


@two_cores
def test_a_server_stays_within_its_cores(tmp_path: Path) -> None:
    with Serve(tmp_path, "-Cr", "1-1") as serve:
        serve.wait_ready()
        assert complete(serve.port, 8)["tokens_predicted"] == 8
        assert set(cores_of_threads(serve.server_pid).values()) == {"1"}
        assert set(cores_of_threads(serve.scheduler_pid).values()) != {"1"}
