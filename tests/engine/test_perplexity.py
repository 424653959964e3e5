"""An unmodified llama-perplexity prints the same number with the engine attached through the environment."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

WORDS = ["every", "expert", "of", "a", "layer", "waits", "for", "its", "token", "and", "then", "computes"]
N_TRIES = 10


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 1,200 bytes, one token each."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(WORDS, 240)))
    return path


def run_once(bin_dir: Path, model: Path, text: Path, ubatch: int, cache: str | None) -> str:
    """The whole log of one run; `cache` is None for no engine."""
    files = ["-m", model, "-f", text]
    command = [bin_dir / "llama-perplexity", *files, "-c", "128", "-b", "128", "-ub", ubatch]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPAC_")}
    if cache is not None:
        environment |= {"PYSPAC_CACHE": cache, "PYSPAC_DEVICE": "cpu"}
    run = subprocess.run(
        [*map(str, command), "--no-repack", "--threads", "1"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    log = run.stdout + run.stderr
    assert run.returncode == 0, log[-2000:]
    return log


def run_perplexity(bin_dir: Path, model: Path, text: Path, ubatch: int, cache: str | None) -> tuple[str, str]:
    """The printed final estimate and the whole log.

    llama.cpp's logger may lose its last lines when the program ends (common/log.cpp says so), so try again.
    """
    for _ in range(N_TRIES):
        log = run_once(bin_dir, model, text, ubatch, cache)
        found = re.search(r"Final estimate: PPL = (\S+ \+/- \S+)", log)
        if found:
            return found.group(1), log
    raise AssertionError(f"no final estimate in {N_TRIES} runs; the last one: {log[-2000:]}")


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek3", "gpt-oss"])
def test_perplexity_is_the_same(name: str, bin_dir: Path, text: Path, tmp_path: Path) -> None:
    types = (Type.Q4_K, Type.Q8_0, Type.MXFP4)
    model = models.write_model(tmp_path / "model.gguf", name, types)
    stock, stock_log = run_perplexity(bin_dir, model, text, 8, cache=None)
    split, split_log = run_perplexity(bin_dir, model, text, 8, cache="25%")
    assert split == stock
    assert "layers split" not in stock_log
    assert re.search(r"(\d+) of \1 MoE layers split, [1-9]\d* slots", split_log), split_log[-2000:]


def test_long_batches_take_stocks_path(bin_dir: Path, text: Path, tmp_path: Path) -> None:
    model = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    stock, _ = run_perplexity(bin_dir, model, text, 64, cache=None)
    split, _ = run_perplexity(bin_dir, model, text, 64, cache="25%")
    assert split == stock


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PYSPAC_LOSSY", "drop:x", "PYSPAC_LOSSY cannot be 'drop:x': give drop:N"),
        ("PYSPAC_BASELINE", "lru", "PYSPAC_BASELINE cannot be 'lru': give EVICTION+MISS"),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, value: str, says: str, bin_dir: Path, text: Path, tmp_path: Path
) -> None:
    model = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    run = subprocess.run(
        [str(bin_dir / "llama-perplexity"), "-m", str(model), "-f", str(text), "-c", "128", "--no-repack"],
        env=os.environ | {"PYSPAC_CACHE": "25%", "PYSPAC_DEVICE": "emulated", variable: value},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 1
    assert says in run.stderr
