"""EAGLE-3 drafts, random ones of random targets: the text is plain decoding's, in a run and in a server."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import eagle_models
import gguf_models
import pytest
from conftest import ROOT
from near_ties import NEAR_TIE, margins
from serving import ONE_THREAD, Serve, post
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands.demo import TARGET
from pyspac.errors import ModelError
from pyspac.model.draft_files import STATE_ARCHITECTURES, check_drafter
from pyspac.model.gguf_header import read_header

PROMPT = "hello world, hello world, hello"
SPEC_TYPE = "draft-eagle3"
TARGETS = ("qwen3moe", "gpt-oss", "mixtral")


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    target = gguf_models.write_model(folder / "target.gguf", name)
    return target, eagle_models.write_eagle3(folder / "draft.gguf", name)


def test_run_command(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path, "qwen3moe")
    arguments = ["run", "-m", str(target), "-p", PROMPT, "-n", "24", "-t", "1", "--stock", "--temp", "0"]
    plain = CliRunner().invoke(app, arguments)
    drafted = CliRunner().invoke(app, [*arguments, "--spec-type", SPEC_TYPE, "-md", str(draft)])
    assert plain.exit_code == drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout


@pytest.mark.parametrize("name", TARGETS)
def test_four_clients_of_a_server(tmp_path: Path, name: str) -> None:
    """All of four texts at once comes; one alone is plain decoding's."""
    pair = write_pair(tmp_path, name)
    arguments = ("--spec-type", SPEC_TYPE, "--speculation", "static", "--draft-max", "3")
    bodies = [
        {"prompt": PROMPT * n, "n_predict": 32, "temperature": 0, "ignore_eos": True} for n in range(1, 5)
    ]
    with ExitStack() as stack:
        serve = Serve(tmp_path, *arguments, passed=("-np", "4", *ONE_THREAD), draft=True, pair=pair)
        stack.enter_context(serve).wait_ready()
        pool = stack.enter_context(ThreadPoolExecutor(4))
        for answer in pool.map(lambda body: post(serve.port, "/completion", body), bodies):
            assert answer["tokens_predicted"] == 32
            assert answer["timings"]["draft_n"] > 0
        alone = post(serve.port, "/completion", bodies[0] | {"return_tokens": True, "cache_prompt": False})
        prompt = post(serve.port, "/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
        assert margins(pair[0], prompt, alone["tokens"]).max() < NEAR_TIE


def test_drafts_of_other_models_are_refused(tmp_path: Path) -> None:
    """A layer and a width that the target has not, a target without states, a draft that cannot run alone."""
    target = gguf_models.write_model(tmp_path / "target.gguf", "qwen3moe")
    deep = eagle_models.write_eagle3(tmp_path / "deep.gguf", "qwen3moe", target_layers=[0, 1, 9])
    wide = eagle_models.write_eagle3(tmp_path / "wide.gguf", "qwen3moe", n_embd_target=512)
    for draft, says in ((deep, "256 and at least 9 layers"), (wide, "the width 512 and at least 2 layers")):
        with pytest.raises(ModelError, match=says) as caught:
            check_drafter(SPEC_TYPE, read_header(target), read_header(draft))
        assert caught.value.exit_code == 2
    silent = gguf_models.write_model(tmp_path / "silent.gguf", "glm4moe")
    with pytest.raises(ModelError, match="does not hand out for the architecture glm4moe"):
        check_drafter(SPEC_TYPE, read_header(silent), read_header(wide))
    draft = eagle_models.write_eagle3(tmp_path / "draft.gguf", "qwen3moe")
    with pytest.raises(ModelError, match="needs --spec-type draft-eagle3"):
        check_drafter("draft", read_header(target), read_header(draft))


def test_inspect_names_the_kind_of_draft(tmp_path: Path) -> None:
    draft = eagle_models.write_eagle3(tmp_path / "draft.gguf", "qwen3moe")
    shown = CliRunner().invoke(app, ["inspect", str(draft)])
    assert shown.exit_code == 0, shown.output
    assert "-md with --spec-type draft-eagle3" in " ".join(shown.output.split())
    assert "--spec-type" not in CliRunner().invoke(app, ["inspect", str(TARGET)]).output


def test_architectures_are_those_that_hand_out_states() -> None:
    """Of llama.cpp's sources: with another one it would abort."""
    sources = ROOT / "build/llama.cpp/src"
    found = {
        path.stem.replace("-", "").replace("_", "")
        for path in (sources / "models").glob("*.cpp")
        if "t_layer_inp[" in path.read_text()
    }
    structs = re.findall(
        r"^struct llama_model_(\w+) :(.*?)^};", (sources / "models/models.h").read_text(), re.S | re.M
    )
    for name, body in structs:
        shared = re.search(r"using graph = llama_model_(\w+)::", body)
        if shared and shared[1].replace("_", "") in found:
            found.add(name.replace("_", ""))
    names = dict(re.findall(r"LLM_ARCH_(\w+),\s+\"([^\"]+)\"", (sources / "llama-arch.cpp").read_text()))
    by_key = {key.lower().replace("_", ""): name for key, name in names.items()}
    assert set(STATE_ARCHITECTURES) == {by_key[key] for key in found}
