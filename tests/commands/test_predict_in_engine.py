"""`--predict next-layer` and `draft-gate`: predictors of the engine move experts, never text."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dense_drafts import write_dense_draft
from typer.testing import CliRunner

from pyspac._native import lib_dir
from pyspac.cli import app

MODELS = Path(__file__).resolve().parents[2] / "pyspac" / "models"
TARGET, DENSE = MODELS / "demo-moe.gguf", MODELS / "demo-draft.gguf"
PROMPT = "def read_header(path):\n    with open(path) as file:\n"


@pytest.fixture(scope="module")
def low_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target itself in fewer bits: a MoE draft whose router inputs fit."""
    path = tmp_path_factory.mktemp("models") / "demo-q4.gguf"
    command = [lib_dir() / "llama-quantize", "--allow-requantize", TARGET, path, "Q4_0"]
    subprocess.run(command, check=True, capture_output=True)
    return path


def run(*arguments: object) -> tuple[list[int], list[Any]]:
    """Tokens, and what the predictors say of themselves."""
    argv = ["run", "-m", str(TARGET), "-p", PROMPT, "-n", "60", "--temp", "0", "--device", "emulated"]
    result = CliRunner().invoke(app, [*argv, "--cache", "25%", "--json", "-", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    return found["token_ids"], found["predictors"]


@pytest.mark.parametrize("name", ["next-layer", "next-layer-2", "next-layer-3"])
def test_next_layer_moves_no_text(name: str):
    plain, nothing = run()
    tokens, (figures,) = run("--predict", name)
    assert tokens == plain
    assert nothing == []
    assert figures["name"] == name
    assert figures["recall"] > 0.4  # of 32 experts 4 are used: the average has 0.3
    assert figures["n_copies_used"] <= figures["n_copied"] <= figures["n_queued"]


def test_draft_gate_moves_no_text(low_bit: Path):
    drafts = ("-md", low_bit, "--draft-max", 4)
    plain, _nothing = run(*drafts)
    tokens, (gate, ahead) = run(*drafts, "--predict", "draft-gate,next-layer")
    assert tokens == plain
    assert gate["recall"] > 0.6
    assert gate["precision"] > 0.5
    assert 0 <= gate["cutoff_layer"] <= 6
    assert ahead["n_inputs"] > 0


@pytest.mark.parametrize("n_layer", [6, 3, 9])
def test_a_dense_draft_of_the_target_s_width_has_a_gate(tmp_path: Path, n_layer: int):
    """As deep as the target, half as deep, deeper; its FFNs are the means of the target's experts."""
    drafts = ("-md", write_dense_draft(tmp_path / "dense.gguf", n_layer), "--draft-max", 4)
    plain, _nothing = run(*drafts)
    tokens, (gate,) = run(*drafts, "--predict", "draft-gate")
    assert tokens == plain
    assert gate["recall"] > 0.5  # by chance 4 of 32, of an average 0.3
    assert gate["precision"] > 0.5
    assert gate["n_inputs"] > 6  # the last may still wait for their thread where the run ends
    assert 0 <= gate["cutoff_layer"] <= 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-md", DENSE, "--predict", "draft-gate"), "demo-draft.gguf has a width of 160"),
        (("--predict", "draft-gate"), "needs a draft model as wide as the target"),
        (("--predict", "next-layer,next-layer-2"), "two distances"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], said: str):
    result = CliRunner().invoke(
        app, ["run", "-m", str(TARGET), "-p", "x", "--device", "emulated", *map(str, arguments)]
    )
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("predict", "said"),
    [
        ("draft-gate:cutoff=3:critical=1", ""),
        ("draft-gate:cutoff=x", 'draft-gate knows no "cutoff=x"'),
        ("draft-gate:critical=0", 'draft-gate knows no "critical=0"'),
        ("next-layer,draft-gate:2", 'draft-gate knows no "2"'),
    ],
)
def test_the_gate_s_own_settings_by_environment(tmp_path: Path, predict: str, said: str):
    text = tmp_path / "text.txt"
    text.write_text(PROMPT * 20, encoding="utf-8")
    argv = map(str, (lib_dir() / "llama-perplexity", "-m", TARGET, "-f", text, "-c", "64", "--no-repack"))
    more = {"PYSPAC_CACHE": "25%", "PYSPAC_DEVICE": "emulated", "PYSPAC_PREDICT": predict}
    done = subprocess.run(
        [*argv, "--chunks", "1", "-ub", "8"],
        env=os.environ | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not said), done.stderr
    assert said in done.stderr
