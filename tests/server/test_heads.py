"""Heads that predict further tokens (MTP), on random models: the text is plain decoding's."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import gguf_models
import head_models
import pytest
from conftest import ROOT
from near_ties import NEAR_TIE, margins
from serving import ONE_THREAD, Serve, post
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.errors import ModelError
from pyspac.model.draft_files import HEAD_ARCHITECTURES, check_drafter, has_head
from pyspac.model.gguf_header import read_header

PROMPT = "hello world, hello world, hello"
MODELS = (*((name, 1) for name in head_models.WITH_HEADS), ("step35", 2))


@pytest.mark.parametrize(("name", "n_heads"), MODELS)
def test_four_clients_of_a_server(tmp_path: Path, name: str, n_heads: int) -> None:
    """Texts of a random model depend on who shares a batch, drafts or not: only a single one is compared."""
    model = head_models.write_headed(tmp_path / "model.gguf", name, n_heads)
    arguments = ("--spec-type", "draft-mtp", "--speculation", "static", "--draft-max", "3")
    bodies = [
        {"prompt": PROMPT * n, "n_predict": 32, "temperature": 0, "ignore_eos": True} for n in range(1, 5)
    ]
    with ExitStack() as stack:
        passed = ("-np", "4", *ONE_THREAD)
        serve = Serve(tmp_path, *arguments, passed=passed, draft=False, pair=(model, model))
        stack.enter_context(serve).wait_ready()
        pool = stack.enter_context(ThreadPoolExecutor(4))
        for answer in pool.map(lambda body: post(serve.port, "/completion", body), bodies):
            assert answer["tokens_predicted"] == 32
            assert answer["timings"]["draft_n"] > 0
        alone = post(serve.port, "/completion", bodies[0] | {"return_tokens": True, "cache_prompt": False})
        prompt = post(serve.port, "/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
        assert alone["timings"]["draft_n"] > 0
        assert margins(model, prompt, alone["tokens"]).max() < NEAR_TIE


def test_what_llama_cpp_would_abort_at_is_refused(tmp_path: Path) -> None:
    for name, n_heads in (("glm4moe", 2), ("deepseek2", 1), ("qwen3moe", 1)):
        model = head_models.write_headed(tmp_path / f"{name}.gguf", name, n_heads)
        assert not has_head(read_header(model))
        with pytest.raises(ModelError, match="no head that predicts further tokens"):
            check_drafter("draft-mtp", read_header(model), None)
    plain = gguf_models.write_model(tmp_path / "plain.gguf", "glm4moe")
    assert not has_head(read_header(plain))


def test_inspect_names_the_drafter(tmp_path: Path) -> None:
    model = head_models.write_headed(tmp_path / "model.gguf", "step35")
    shown = CliRunner().invoke(app, ["inspect", str(model)]).output
    assert "has an MTP head: --spec-type draft-mtp" in shown
    plain = gguf_models.write_model(tmp_path / "plain.gguf", "glm4moe")
    assert "head: --spec" not in CliRunner().invoke(app, ["inspect", str(plain)]).output


def test_architectures_are_those_with_a_graph() -> None:
    """Of llama.cpp's sources: an architecture of none would compute its first layers instead."""
    sources = ROOT / "build/llama.cpp/src"
    graphs = {
        path.stem.replace("-", "").replace("_", "")
        for path in (sources / "models").glob("*.cpp")
        if "LLM_GRAPH_TYPE_DECODER_MTP" in path.read_text()
    }
    names = dict(re.findall(r"LLM_ARCH_(\w+),\s+\"([^\"]+)\"", (sources / "llama-arch.cpp").read_text()))
    with_graph = {name for key, name in names.items() if key.lower().replace("_", "") in graphs}
    assert set(HEAD_ARCHITECTURES) == with_graph
