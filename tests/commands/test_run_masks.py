"""`--mtp`: random adapters on random models, whose text is plain decoding's, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import gguf_models
import pytest
from mask_adapters import write_adapter
from near_ties import NEAR_TIE, margins
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.engine.engine import tokens_per_expert
from pyspac.forward.model import Model, ModelParams

PROMPT = "hello world, hello world, hello"
# sliding windows; an output matrix that is the embeddings'; biases and a norm of q and k
ARCHITECTURES = ("qwen3moe", "gpt-oss", "mixtral")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(model, adapter) by architecture."""
    folder = tmp_path_factory.mktemp("masks")
    found = {}
    for name in ARCHITECTURES:
        model = gguf_models.write_model(folder / f"{name}.gguf", name)
        found[name] = model, write_adapter(folder / f"{name}-mtp.gguf", model)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("placement", [("emulated", "40%"), ("none", "auto")], ids=str)
def test_greedy_text_is_plain_decodings(
    models: dict[str, tuple[Path, Path]], name: str, placement: tuple[str, str]
) -> None:
    model, adapter = models[name]
    device, cache = placement
    placed = ["--device", device, "--cache", cache, "--host-kernels", "auto" if device == "none" else "ggml"]

    def answer(*drafts: str) -> dict[str, Any]:
        argv = ["run", "-m", str(model), "-p", PROMPT, "-n", "32", "-t", "1", "--temp", "0", *placed, *drafts]
        result = CliRunner().invoke(app, [*argv, "--json", "-"])
        assert result.exit_code == 0, result.output
        return cast("dict[str, Any]", json.loads(result.stdout))

    found = answer("--mtp", str(adapter), "--draft-max", "2")
    assert found["n_drafted"] > 0
    tokens = found["token_ids"]
    with Model(ModelParams(path=model)) as loaded:
        prompt = loaded.vocab.tokenize(PROMPT)
    if device == "none" and tokens != (plain := answer()["token_ids"]):
        # they may part at a near tie: a float's last bit, which differs from width to width, may be a step of
        # an activation's 8 bits
        n_equal = next(
            i for i, (ours, theirs) in enumerate(zip(tokens, plain, strict=True)) if ours != theirs
        )
        assert margins(model, prompt, tokens[: n_equal + 1], is_own=True).max() < 0.005
    own = (
        0.1 if tokens_per_expert() else 0.05
    )  # rounding of the engine's own kernels, with tiles of bf16 or without
    rounding = NEAR_TIE if device == "emulated" else own
    assert margins(model, prompt, tokens).max() < rounding


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["run", "-p", "x", "-n", "4", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_what_is_refused(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    model, adapter = models["qwen3moe"]
    assert "trained on another model" in refused("-m", models["mixtral"][0], "--mtp", adapter)
    ordinary = write_adapter(tmp_path / "lora.gguf", model, is_gated=False)
    assert "no adapter with mask tokens" in refused("-m", model, "--mtp", ordinary)
    experts = write_adapter(tmp_path / "ffn.gguf", model, extra=("blk.0.ffn_gate_inp.weight",))
    assert "act on masks only" in refused("-m", model, "--mtp", experts)
    beyond = write_adapter(tmp_path / "beyond.gguf", model, mask_ids=[5, gguf_models.N_VOCAB])
    assert "a mask has the id 259" in refused("-m", model, "--mtp", beyond)
    assert "give one with --mtp" in refused("-m", model, "--spec-type", "draft-lora")
    assert "leave out --mtp" in refused("-m", model, "--spec-type", "ngram", "--mtp", adapter)
    assert "leave out one of them" in refused("-m", model, "--mtp", adapter, "--stock")


def test_run_makes_room_for_all_masks_that_are_asked_for(tmp_path: Path) -> None:
    """8 drafts and as many masks behind each: more tokens than a step of an ordinary drafter has."""
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe")
    adapter = write_adapter(tmp_path / "mtp.gguf", model, mask_ids=range(3, 11))
    arguments = ["run", "-m", model, "--mtp", adapter, "--draft-max", "8", "-p", PROMPT, "-n", "8", "-t", "1"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--device", "emulated", "--cache", "40%"])
    assert result.exit_code == 0, result.output


def test_adapters_and_heads_are_told_apart(models: dict[str, tuple[Path, Path]]) -> None:
    """--mtp and --spec-type draft-mtp sound alike: whoever mixes them up is told which is which."""
    model, adapter = models["qwen3moe"]
    both = refused("-m", model, "--mtp", adapter, "--spec-type", "draft-mtp")
    assert "draft-mtp means the head that a model has built in: leave one of them out" in both
    assert "needs no head, only --mtp" in refused("-m", model, "--spec-type", "draft-mtp")
    assert "give a draft or a head with -md" in refused("-m", model, "--mtp", model)
    wrong = refused("-m", model, "-md", adapter, "--spec-type", "draft-mtp")
    assert "an adapter with mask tokens, not a model; give it with --mtp" in wrong
    built_in = "a head that the model has built in needs none: --spec-type draft-mtp"
    assert built_in in refused("-m", model, "--spec-type", "draft-lora")


def test_a_model_that_cannot_keep_masks_apart_is_refused(tmp_path: Path) -> None:
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3next")
    adapter = write_adapter(tmp_path / "mtp.gguf", model)
    assert "recurrent layers" in refused("-m", model, "--mtp", adapter)
