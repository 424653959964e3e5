"""Programs that watch every node of the graph (cb_eval) see stock's, with PYSPAC_CACHE or without."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import gguf_models
import pytest
from llama_helpers import loaded_model, new_context
from serving import TARGET

from pyspac.engine import engine as native
from pyspac.engine.params import EngineParams
from pyspac.errors import EngineError

WORDS = ["every", "expert", "waits", "for", "its", "token", "and", "then", "computes"]


def run_imatrix(bin_dir: Path, text: Path, out: Path, **variables: str) -> str:
    """Write `out`; returns the log. Batches of 16: those that the engine would split."""
    files = ["-m", str(TARGET), "-f", str(text), "-o", str(out)]
    run = subprocess.run(
        [bin_dir / "llama-imatrix", *files, "-c", "128", "-b", "128", "-ub", "16", "--no-repack", "-t", "1"],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYSPAC_")} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-2000:]
    return f"{run.stdout}\n{run.stderr}"


def test_llama_imatrix_writes_the_same_file(bin_dir: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS * 60))
    stock, beside = tmp_path / "stock.gguf", tmp_path / "beside.gguf"
    run_imatrix(bin_dir, text, stock)
    log = run_imatrix(bin_dir, text, beside, PYSPAC_CACHE="25%", PYSPAC_DEVICE="cpu")
    said = [line for line in log.splitlines() if "spac: " in line]  # llama.cpp logs from another thread
    assert len(said) == 1, said
    assert "cb_eval" in said[0]
    assert "stays as it is" in said[0]
    assert beside.read_bytes() == stock.read_bytes()


def test_attaching_to_a_watched_context_is_refused(tmp_path: Path) -> None:
    from llama_cpp import llama_cpp as api

    @api.ggml_backend_sched_eval_callback
    def watch(_tensor: Any, _ask: Any, _user_data: Any) -> bool:
        return False

    path = gguf_models.write_model(tmp_path / "qwen3moe.gguf", "qwen3moe")
    with (
        loaded_model(path) as model,
        new_context(model, cb_eval=watch) as ctx,
        pytest.raises(EngineError, match=r"no MoE layer can be split.*cb_eval"),
    ):
        native.Engine.attach(ctx, EngineParams(device="cpu", cache="50%"))
