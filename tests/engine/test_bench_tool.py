"""An unmodified llama-bench runs with the engine attached through the environment, and says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import gguf_models as models
import pytest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model(tmp_path_factory.mktemp("model") / "model.gguf", "qwen3moe")


def run_bench(bin_dir: Path, model: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [bin_dir / "llama-bench", "-m", model, "-p", "32", "-n", "16", "-r", "2", "-o", "json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPAC_")}
    return subprocess.run(
        [*map(str, command), "--repack", "0", "-t", "1"],
        env=environment | variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_bench_runs_with_the_engine(bin_dir: Path, model: Path) -> None:
    run = run_bench(bin_dir, model, PYSPAC_CACHE="25%", PYSPAC_DEVICE="cpu")
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads(run.stdout)  # what the engine says must not be on stdout
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(32, 0), (0, 16)]
    assert all(row["avg_ts"] > 0 for row in rows)
    assert re.search(r"3 of 3 MoE layers split, [1-9]\d* slots in 3 groups", run.stderr), run.stderr[-2000:]


def test_bench_without_a_gpu_has_the_kernels(bin_dir: Path, model: Path) -> None:
    """PYSPAC_DEVICE unset is auto: no device is emulated."""
    run = run_bench(bin_dir, model, PYSPAC_CACHE="auto")
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.search(r"the engine's (avx\w+|amx) kernels compute the host's experts of 3 layers", run.stderr)


def test_bench_without_the_variable_is_silent(bin_dir: Path, model: Path) -> None:
    run = run_bench(bin_dir, model)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "MoE layers" not in run.stderr


@pytest.mark.parametrize(
    ("cache", "device"), [("0", "cpu"), ("0.001%", "cpu"), ("twelve", "cpu"), ("25%", "auto")]
)
def test_bench_with_a_cache_that_cannot_be_fails(cache: str, device: str, bin_dir: Path, model: Path) -> None:
    """Never silently without the engine."""
    run = run_bench(bin_dir, model, PYSPAC_CACHE=cache, PYSPAC_DEVICE=device)
    assert run.returncode != 0
    assert "cache" in run.stderr
