"""The split on a CUDA device: a real one, or the emulated one of tools/cuda_emulator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_models as models
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))

import logits

from pyspac.engine.devices import choose_device

MODELS = ROOT / "pyspac" / "models"
MODEL = MODELS / "demo-moe.gguf"
N_LAYERS = 6
PROMPT = "def parse_args(argv):"

pytestmark = pytest.mark.gpu


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pyspac run` of the demo model on the first CUDA device."""
    options = ["-m", MODEL, "--device", "CUDA0", "-p", PROMPT, *arguments]
    command = [sys.executable, "-m", "pyspac", "run", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)


def run_json(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_drafted_run_uses_both_sides() -> None:
    result = run_json("-md", MODELS / "demo-draft.gguf", "--cache", "25%", "--draft-max", "4", "-n", "16")
    assert (result["device"], result["emulated"]) == ("CUDA0", False)
    assert result["n_tokens"] == 16
    assert result["n_accepted"] > 0
    assert result["layers"] == {"split": N_LAYERS, "declined": {}, "unpinned": 0}
    experts = result["experts"]
    assert experts["n_steps_with_both"] > 0
    assert experts["n_loads"] > 0
    assert experts["n_hit"] > 0


def test_routers_on_the_device_are_asked_early() -> None:
    """The routers lie on the GPU, and are applied on the host: they say more than chance does."""
    result = run_json("--cache", "50%", "-n", "12", "--predict", "next-layer")
    (figures,) = result["predictors"]
    assert figures["recall"] > 0.4  # 4 of 32 experts are used
    assert figures["n_copies_used"] <= figures["n_copied"]


def test_a_split_model_answers_as_stock() -> None:
    """Greedy text of 8 tokens: the device rounds otherwise, but not so much that the first words change."""
    split = run_json("--cache", "50%", "-n", "8")
    assert split["experts"]["n_hit"] > 0
    assert split["token_ids"] == run_json("--stock", "--no-repack", "-n", "8")["token_ids"]


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek2", "llama4", "qwen3next"])
def test_logits_are_as_near_as_stock_gets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases with a GLU of their own, shared experts, weights before the FFN, linear attention."""
    monkeypatch.setattr(logits, "FIRST_TOKEN", 1)  # the vocabulary is small
    monkeypatch.setattr(logits, "WIDTHS", (1, 5, 9, 2, 1))
    path = models.write_model(tmp_path / "model.gguf", name, models.MIXED_TYPES)
    row = logits.compare(path, choose_device("CUDA0"), 2, print)
    assert row["ok"], row


def test_a_cache_that_does_not_fit_is_refused() -> None:
    done = run("--cache", "10000000", "-n", "1")
    assert done.returncode == 2
    assert "--cache" in done.stderr


def n_graphs(*arguments: str) -> int:
    """How many CUDA graphs a run launches; only the emulated device counts them."""
    done = run(*arguments, CUDA_EMULATOR_REPORT="1")
    assert done.returncode == 0, done.stderr
    counted = re.search(r"cuda-emulator: (\d+) graphs launched", done.stderr)
    return int(counted[1]) if counted else 0


def test_parts_of_the_split_are_replayed_as_graphs() -> None:
    """Each of the parts between host experts becomes a CUDA graph in its third step, as without the split."""
    n_parts, n_steps = 2 * N_LAYERS + 1, 11
    n_predict = ("-n", str(n_steps + 1))
    if n_graphs("--stock", *n_predict) == 0:
        pytest.skip("not counted, or none on this architecture")
    assert n_graphs("--cache", "25%", *n_predict) >= n_parts * (n_steps - 2)


def test_contenders_of_the_benchmark_take_the_same_steps(tmp_path: Path) -> None:
    """Kernels that round differently must not change which drafts fit."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--no-build", "--device", "CUDA0"]
    command += ["--model", str(MODEL), "--phases", "compare", "--arms", "stock-sd,ncmoe-sd,split-ema"]
    command += ["--tokens", "16", "--warm-up", "4", "--rounds", "1", "--cache", "34%", "--budget", "280"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--work", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("gpu-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = {row["arm"]: row["tokens_per_step"] for row in rows if row["row"] == "compare"}
    assert steps.keys() == {"stock-sd", "ncmoe-sd", "split-ema"}
    assert len(set(steps.values())) == 1
    assert steps["stock-sd"] > 1
