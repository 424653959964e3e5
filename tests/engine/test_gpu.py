"""The split on a CUDA device: a real one, or the emulated one of tools/cuda_emulator."""

from __future__ import annotations

import json
import os
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
    options = ["-m", MODEL, "--device", "CUDA0", "--temp", "0", "-p", PROMPT, *arguments]
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


def test_a_prompt_passes_through_the_slots() -> None:
    """Each expert is copied at most once for it, those that are resident are not; the text is stock's."""
    prompt = ("-p", "def parse_args(argv): " * 12)
    staged, stock = (run_json("-n", "4", *prompt, *how) for how in (("--cache", "50%"), ("--stock",)))
    assert staged["token_ids"] == stock["token_ids"]
    experts = staged["experts"]
    n_experts = N_LAYERS * 32
    assert n_experts // 2 < experts["n_staged"] <= n_experts
    assert experts["loaded_bytes"] / experts["n_loads"] == experts["staged_bytes"] / experts["n_staged"]
    assert experts["stage_wait_us"] > 0
    without = run_json("--cache", "50%", "-n", "4", *prompt, "--policy", "without=['stage']")
    assert without["experts"]["n_staged"] == 0
    assert without["token_ids"] == stock["token_ids"]


def test_a_cache_that_does_not_fit_is_refused() -> None:
    done = run("--cache", "10000000", "-n", "1")
    assert done.returncode == 2
    assert "--cache" in done.stderr


def traced(tmp_path: Path, *arguments: str) -> list[tuple[str, str, bool]]:
    """The run's calls of CUDA: thread, name, whether it may block; only the emulated device tells them."""
    trace = tmp_path / "trace"
    done = run(*arguments, CUDA_EMULATOR_TRACE=str(trace))
    assert done.returncode == 0, done.stderr
    if not trace.exists():
        pytest.skip("only the emulated device tells what is called")
    calls = [line.split() for line in trace.read_text().splitlines()]
    trace.unlink()
    return [(call[0], call[1], len(call) > 2) for call in calls]


def n_graphs(calls: list[tuple[str, str, bool]]) -> int:
    return sum(name == "cudaGraphLaunch" for _, name, _ in calls)


def test_a_step_is_one_graph(tmp_path: Path) -> None:
    """From the third step of a width on, and no more graphs than stock's parts between host experts."""
    n_steps = 11
    n_predict = ("-n", str(n_steps + 1))
    if n_graphs(traced(tmp_path, "--stock", *n_predict)) == 0:
        pytest.skip("no CUDA graphs on this architecture")
    assert n_steps - 2 <= n_graphs(traced(tmp_path, "--cache", "25%", *n_predict)) <= n_steps


def test_no_layer_waits(tmp_path: Path) -> None:
    """No call that may block between the first layer and the last, when a step is not replayed as a graph."""
    calls = traced(tmp_path, "--cache", "25%", "-n", "4")
    n_functions = 2 * N_LAYERS  # dispatch and collect
    graph_thread = next(thread for thread, name, _ in calls if name == "cudaLaunchHostFunc")
    own = [(name, blocks) for thread, name, blocks in calls if thread == graph_thread]
    functions = [index for index, (name, _) in enumerate(own) if name == "cudaLaunchHostFunc"]
    n_steps, n_others = divmod(len(functions), n_functions)
    assert n_others == 1  # attaching asks whether the device calls functions
    assert n_steps == 4  # the prompt, and a step for each further token
    for step in range(2, n_steps):  # the first one of a width takes memory
        first = functions[n_others + step * n_functions]
        last = functions[n_others + (step + 1) * n_functions - 1]
        assert not [name for name, blocks in own[first:last] if blocks]


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
