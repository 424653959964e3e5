"""`--predict next-layer` and `draft-gate`: predictors of the engine move experts, never text."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pyspac._native import lib_dir
from pyspac.errors import EngineError, UsageError
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.session import Session

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


def run(draft: Path | None = None, predict: tuple[str, ...] = (), **more: Any) -> tuple[list[int], list[Any]]:
    """Tokens, and what the predictors say of themselves."""
    if draft is not None:
        more |= {"draft": draft, "draft_max": 4, "speculation": "static"}
    options = RunOptions(
        model=TARGET, n_predict=60, device="cpu", cache=CacheSize(text="25%"), predict=predict, **more
    )
    with Session(options) as session:
        tokens = session.generate(session.tokenize(PROMPT)).token_ids
        assert session.split is not None
        return tokens, session.split.predictors_list()


@pytest.mark.parametrize("name", ["next-layer", "next-layer-2", "next-layer-3"])
def test_next_layer_moves_no_text(name: str):
    plain, nothing = run()
    tokens, (figures,) = run(predict=(name,))
    assert tokens == plain
    assert nothing == []
    assert figures["name"] == name
    assert figures["recall"] > 0.4  # of 32 experts 4 are used: the average has 0.3
    assert figures["n_copies_used"] <= figures["n_copied"] <= figures["n_queued"]


def test_draft_gate_moves_no_text(low_bit: Path):
    plain, _nothing = run(low_bit)
    tokens, (gate, ahead) = run(low_bit, ("draft-gate", "next-layer"))
    assert tokens == plain
    assert gate["recall"] > 0.6
    assert gate["precision"] > 0.5
    assert 0 <= gate["cutoff_layer"] <= 6
    assert ahead["n_inputs"] > 0


def test_a_dense_draft_is_refused():
    with pytest.raises(EngineError, match="dense") as error:
        run(DENSE, ("draft-gate",))
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("predict", "more", "text"),
    [
        (("draft-gate",), {}, "needs a MoE draft model"),
        (("next-layer", "next-layer-2"), {}, "two distances"),
    ],
)
def test_bad_input(predict: tuple[str, ...], more: dict[str, Any], text: str):
    with pytest.raises(UsageError, match=text):
        RunOptions(model=TARGET, predict=predict, **more)
