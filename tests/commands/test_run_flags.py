"""llama-server's flags in `run` and `chat`, and a server that runs already: `--server URL`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mask_adapters import write_adapter
from serving import ONE_THREAD, TARGET, Serve, run_pyspac
from typer.testing import CliRunner, Result

from pyspac.cli import app

PROMPT = "def f(x):\n    return"
KEY = "sesame"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["answer", "n"],
    "additionalProperties": False,
}


def run(*arguments: str | Path) -> Result:
    """Of the demo model, with one thread."""
    common = ("run", "-m", TARGET, "--device", "none", "-t", "1", "-p", PROMPT)
    result = CliRunner().invoke(app, list(map(str, (*common, *arguments))), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result


def run_json(*arguments: str | Path) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", "-").stdout)  # type: ignore[no-any-return]


def test_a_grammar_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "g.gbnf").write_text('root ::= "left" | "right"')
    found = run_json("--grammar-file", tmp_path / "g.gbnf", "-n", "16")
    assert found["text"] in ("left", "right")
    assert found["stop_reason"] == "eog"


def test_a_json_schema() -> None:
    found = json.loads(run("--json-schema", json.dumps(SCHEMA), "-n", "200", "--temp", "0").stdout)
    assert found.keys() == {"answer", "n"}
    assert found["answer"] in ("yes", "no")
    assert 0 <= found["n"] <= 9


def test_samplers_in_an_order_of_ones_own() -> None:
    """Where one token is left, the temperature chooses nothing."""
    greedy = run_json("--temp", "0", "-n", "12")
    one_left = run_json("--samplers", "top_k;temperature", "--top-k", "1", "--temp", "5", "-n", "12")
    assert one_left["token_ids"] == greedy["token_ids"]
    others = run_json("--samplers", "temperature", "--top-k", "1", "--temp", "5", "-s", "1", "-n", "12")
    assert others["token_ids"] != greedy["token_ids"], "--top-k was left out"
    assert others["seed"] == 1


def test_a_lora_changes_the_text(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "lora.gguf", TARGET, is_gated=False)
    plain = run_json("--temp", "0", "-n", "12")
    adapted = run_json("--temp", "0", "-n", "12", "--lora", adapter)
    silent = run_json("--temp", "0", "-n", "12", "--lora-scaled", f"{adapter}:0.0")
    assert adapted["token_ids"] != plain["token_ids"]
    assert silent["token_ids"] == plain["token_ids"]


def test_a_pipe_that_is_no_text() -> None:
    result = CliRunner().invoke(app, ["run", "-m", str(TARGET), "--device", "none"], input="a\0b")
    assert result.exit_code == 2
    assert "holds zero bytes" in result.stderr


def test_a_file_that_is_not_there_is_llama_servers_error() -> None:
    arguments = ["run", "-m", str(TARGET), "-p", "x", "--grammar-file", "/nowhere.gbnf"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--grammar-file" in result.stderr
    assert result.stdout == ""


# ---- a server that runs already


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One that wants a key."""
    folder = tmp_path_factory.mktemp("served")
    with Serve(folder, passed=("-np", "1", *ONE_THREAD), variables={"LLAMA_API_KEY": KEY}) as serve:
        yield serve.wait_ready()


def ask(serve: Serve, tmp_path: Path, *arguments: str, key: str | None = KEY) -> Any:
    variables = {} if key is None else {"LLAMA_API_KEY": key}
    common = ("run", "--server", serve.url, "-p", PROMPT, "-n", "8")
    return run_pyspac(*common, *arguments, cache_dir=tmp_path, variables=variables)


def test_a_server_that_runs_is_asked(served: Serve, tmp_path: Path) -> None:
    done = ask(served, tmp_path, "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mode"] == "server"
    assert found["server"] == served.url
    assert found["n_tokens"] == len(found["token_ids"]) == 8
    assert found["tps"] > 0
    assert "tokens/s" in done.stderr
    as_openai = run_pyspac(
        "run", "--server", f"{served.url}/v1", "-p", PROMPT, "-n", "2", cache_dir=tmp_path,
        variables={"LLAMA_API_KEY": KEY},
    )  # fmt: skip
    assert as_openai.returncode == 0, as_openai.stderr


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_server_that_wants_another_key(served: Serve, tmp_path: Path, key: str | None) -> None:
    done = ask(served, tmp_path, key=key)
    assert done.returncode == 1
    assert "Invalid API Key: set LLAMA_API_KEY to the server's key" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_server_there(tmp_path: Path) -> None:
    done = run_pyspac("run", "--server", "http://127.0.0.1:1", "-p", "x", cache_dir=tmp_path)
    assert done.returncode == 1
    assert "the server at http://127.0.0.1:1 does not answer" in done.stderr
    assert "Traceback" not in done.stderr


# ---- reasoning
