"""Weights that the engine reads while a model is loaded: the same bits, and errors that say where."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyspac._native import bin_dir
from pyspac.engine.engine import host_buffer_type
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import ALL_TENSORS, LOAD_MODE_AUTO, LOAD_MODE_NONE, Model, ModelParams
from tools.system_faults import VARIABLE, SystemFaults, has_compiler, prepare

DEMO = Path(__file__).resolve().parents[2] / "pyspac" / "models" / "demo-moe.gguf"
OPEN = Path("/proc/self/fd")
TOKENS = (11, 502, 77, 1203)


def params(path: Path, load_mode: int) -> ModelParams:
    buft = host_buffer_type() if load_mode == LOAD_MODE_NONE else None
    return ModelParams(
        path=path, load_mode=load_mode, buft=buft, buft_tensors=ALL_TENSORS, use_extra_bufts=False
    )


def logits(path: Path, load_mode: int) -> NDArray[np.float32]:
    with Model(params(path, load_mode)) as model, Context(model, ContextParams(n_ctx=64, n_threads=1)) as ctx:
        return ctx.decode(TOKENS, 1).copy()


def test_the_bits_are_those_of_the_mapping() -> None:
    assert np.array_equal(logits(DEMO, LOAD_MODE_NONE), logits(DEMO, LOAD_MODE_AUTO))


def test_a_model_in_several_files(tmp_path: Path) -> None:
    program = bin_dir() / "llama-gguf-split"
    split = ["--split", "--split-max-tensors", "20", str(DEMO), str(tmp_path / "part")]
    subprocess.run([str(program), *split], check=True, capture_output=True, timeout=60)
    first = min(tmp_path.glob("part-*.gguf"))
    assert len(list(tmp_path.glob("part-*.gguf"))) > 2
    assert np.array_equal(logits(first, LOAD_MODE_NONE), logits(DEMO, LOAD_MODE_AUTO))


def test_ctrl_c_ends_it() -> None:
    n_open = len(list(OPEN.iterdir()))
    with pytest.raises(KeyboardInterrupt):
        Model(params(DEMO, LOAD_MODE_NONE), lambda fraction: False)
    assert len(list(OPEN.iterdir())) == n_open


def run_with_faults(folder: Path, *flags: str, **faults: int) -> subprocess.CompletedProcess[str]:
    variables = prepare(folder)
    SystemFaults(Path(variables[VARIABLE])).set(**faults)
    argv = [
        sys.executable,
        "-m",
        "pyspac",
        "run",
        "-m",
        str(DEMO),
        "-p",
        "def",
        "-n",
        "2",
        "--device",
        "none",
    ]
    return subprocess.run(
        [*argv, *flags], env=os.environ | variables, capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
def test_a_read_that_fails_says_where(tmp_path: Path) -> None:
    run = run_with_faults(tmp_path, read_every=1)
    assert run.returncode == 2
    assert f"{DEMO} cannot be read at byte" in run.stderr
    assert "Input/output error" in run.stderr
    assert run.stdout == ""


@pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")
def test_a_slow_disk_is_told(tmp_path: Path) -> None:
    # one such read is enough: of what takes less than two seconds nothing is said
    run = run_with_faults(tmp_path, "--verbose", slow_every=10, slow_us=2_200_000)
    assert run.returncode == 0
    assert re.search(r"spac: loaded 0\.0 GB in \d+\.\d s, 0\.00 GB/s", run.stderr)
