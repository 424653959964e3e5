"""Bad input through the command line: a message that says what to do, exit code 2, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import input_models
import pytest
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.engine.devices import Device, cpu_device
from pyspac.errors import ConfigError, ModelError
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.forward.preflight import check_run
from pyspac.model.checks import check_same_vocab
from pyspac.model.gguf_header import GgufHeader, read_header
from pyspac.units import MIB

Maker = Callable[[Path], Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return input_models.write_target(tmp_path_factory.mktemp("models") / "target.gguf")


def refused(*arguments: str | Path, folder: Path, says: list[str]) -> None:
    """`pyspac run` with these arguments fails as bad input should."""
    before = sorted(path.name for path in folder.iterdir())
    text = ["-p", "hello", "-n", "2", "--json", str(folder / "out.json")]
    result = CliRunner().invoke(app, ["run", *text, *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    for part in says:
        assert part in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == before, "something was written"


# ---- files ---------------------------------------------------------------------------------------

FILES: dict[str, tuple[Callable[[Path, Path], object], list[str]]] = {
    "missing": (lambda path, target: None, ["there is no such file; check the path"]),
    "folder": (lambda path, target: path.mkdir(), ["this is a folder"]),
    "empty": (lambda path, target: path.write_bytes(b""), ["this file is empty", "download"]),
    "text": (lambda path, target: path.write_text("hello, I am a README"), ["not a GGUF file", "b'hell'"]),
    "version": (lambda path, target: input_models.write_version(path, target, 9), ["GGUF version 9"]),
    "cut header": (
        lambda path, target: input_models.write_cut(path, target, 500),
        ["this file is cut off", "byte 500"],
    ),
    "truncated": (
        lambda path, target: input_models.write_cut(path, target, -1000),
        ["this file is truncated: tensor", "download or copy it again"],
    ),
    "F64": (lambda path, target: input_models.write_f64(path), ["output_norm.weight is F64", "F32"]),
    "no tensors": (lambda path, target: input_models.write_vocab_only(path), ["this file has no tensors"]),
    "dense": (
        lambda path, target: input_models.write_dense(path),
        ["is a dense model", "pyspac run --stock"],
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_cannot_be_used(kind: str, target: Path, tmp_path: Path) -> None:
    make, says = FILES[kind]
    make(tmp_path / "bad.gguf", target)
    refused("-m", tmp_path / "bad.gguf", "--device", "cpu", folder=tmp_path, says=["bad.gguf", *says])


@pytest.mark.parametrize("kind", sorted(FILES.keys() - {"dense"}))
def test_drafts_that_cannot_be_used(kind: str, target: Path, tmp_path: Path) -> None:
    make, says = FILES[kind]
    make(tmp_path / "bad.gguf", target)
    arguments = ("-m", target, "-md", tmp_path / "bad.gguf", "--device", "cpu", "--stock")
    refused(*arguments, folder=tmp_path, says=["bad.gguf", *says])


@pytest.mark.parametrize("at", [5, 8, 24, 30, 100, 1000, 3000])
def test_any_cut_is_found(at: int, target: Path, tmp_path: Path) -> None:
    cut = input_models.write_cut(tmp_path / "cut.gguf", target, at)
    refused("-m", cut, "--device", "cpu", folder=tmp_path, says=["cut.gguf", "again"])


def test_draft_with_another_vocabulary(target: Path, tmp_path: Path) -> None:
    draft = input_models.write_other_vocab(tmp_path / "other.gguf")
    says = ["other.gguf", "another vocabulary", "token 100 is '<0x@@>' in the draft", "--spec-type ngram"]
    refused("-m", target, "-md", draft, "--device", "cpu", folder=tmp_path, says=says)


@pytest.mark.parametrize(("add_bos", "is_refused"), [(True, True), (False, False)])
def test_other_bos_counts_only_where_it_is_added(
    add_bos: bool, is_refused: bool, target: Path, tmp_path: Path
) -> None:
    header = read_header(target)
    ours = header.metadata | {"tokenizer.ggml.add_bos_token": add_bos}
    theirs = ours | {"tokenizer.ggml.bos_token_id": 77}
    pair = [GgufHeader(header.path, metadata, header.tensors) for metadata in (ours, theirs)]
    with pytest.raises(ModelError, match="bos_token_id is 77") if is_refused else nullcontext():
        check_same_vocab(*pair)


def test_draft_with_the_same_vocabulary(target: Path, tmp_path: Path) -> None:
    draft = input_models.write_dense(tmp_path / "draft.gguf")
    options = ForwardOptions(model=target, draft=draft, device="cpu", cache=CacheSize(text="50%"))
    assert check_run(options, cpu_device()).draft == read_header(draft)


@pytest.mark.parametrize(
    ("cache", "free_mib", "says"),
    [
        ("50%", 300, None),
        ("50%", 256, "at most the 0 MiB that it may take of GPU0's free memory"),  # the engine's margin
        ("300", 300, None),  # all experts, which take less
        ("301", 300, "at most the 44 MiB"),  # beyond the device
    ],
)
def test_a_cache_leaves_the_engines_margin(cache: str, free_mib: int, says: str | None, target: Path) -> None:
    options = ForwardOptions(model=target, cache=CacheSize(text=cache))
    n_bytes = free_mib * MIB
    device = Device(name="GPU0", description="", handle=1, memory_free=n_bytes, memory_total=n_bytes)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_run(options, device)


# ---- settings ------------------------------------------------------------------------------------

SETTINGS: list[tuple[list[str], list[str]]] = [
    (["--cache", "0"], ["--cache cannot be '0'", "--stock"]),
    (["--cache", "0%"], ["--cache cannot be '0%'", "--stock"]),
    (["--cache", "lots"], ["--cache lots is no size", "25%"]),
    (["--cache", "170%"], ["--cache 170% is no size", "25%"]),
    (["--cache", "999999999"], ["--cache cannot be '999999999'", "CPU's free memory"]),
    (["--cache", "0.01"], ["--cache cannot be '0.01'", "at least one expert"]),
    (["-c", "513"], ["-c cannot be 513", "at most 512"]),
    (["-c", "-1"], ["-c cannot be -1"]),
    (["-n", "-2"], ["-n cannot be -2"]),
    (["-t", "0"], ["-t cannot be 0"]),
    (["--device", "CUDA99"], ['no device "CUDA99" here', "emulated"]),
    (["--rpc", "nowhere"], ["--rpc cannot be 'nowhere'", "HOST:PORT"]),
    (["--rpc", "127.0.0.1:1"], ["--rpc cannot be '127.0.0.1:1'", "ggml-rpc-server"]),
    (["--spec-type", "draft"], ["--spec-type draft needs a draft model", "-md"]),
    (["--spec-type", "magic"], ["--spec-type cannot be 'magic'", "ngram"]),
    (["-Cr", "1-0"], ['cpu range cannot be "1-0"', "such as 0-7"]),
    (["--cpu-range", "0-999"], ['cpu range cannot be "0-999"', "open to this process"]),
    (["--draft-max", "4"], ["--draft-max 4 has no effect", "-md"]),
    (["--speculation", "auto"], ["--speculation auto has no effect", "-md", "--spec-type ngram"]),
    (["--spec-type", "ngram", "--draft-max", "0"], ["--draft-max cannot be 0", "from 1 to 255"]),
    (["-t", "513"], ["-t cannot be 513", "from 1 to 512"]),
    (["--policy", "magic"], ["--policy cannot be 'magic'", "spac", "No such file"]),
    (["--policy", "estimator='magic'"], ["estimator cannot be 'magic'", "spac"]),
    (["--policy", "threshold=0"], ["threshold cannot be 0", "from 1 to 255"]),
    (["--policy", "threshold='high'"], ["threshold cannot be 'high'", "from 1 to 255"]),
    (["--policy", "without=['evict','brakes']"], ["without cannot be 'brakes'", "prefetch"]),
    (["--policy", "without=[1]"], ["--policy cannot be", "of the right types"]),
    (["--policy", "brakes=1"], ["other settings than brakes", "link_gb_s"]),
    (["--policy", "="], ["--policy cannot be '='", "TOML"]),
    (["--policy", "estimator=spac"], ["TOML", 'texts in quotes (estimator = "spac")']),
    (["--policy", "link_gb_s=-3"], ["link_gb_s cannot be -3"]),
    (["--policy", "copy_gb_s=[2,-3]"], ["copy_gb_s cannot be -3"]),
    (["--policy", "copy_gb_s='2'"], ["copy_gb_s cannot be '2'"]),
    (["--policy", "copy_gb_s=''"], ["copy_gb_s cannot be ''"]),
    (["--policy", "a=" + "[" * 9999], ["--policy cannot be", "TOML"]),
    (["--policy", "lru+magic"], ["--policy cannot be 'lru+magic'", "least-stale", "balance"]),
    (["--policy", "magic+fetch"], ["--policy cannot be 'magic+fetch'", "least-stale"]),
    (["--policy", "lru+"], ["--policy cannot be 'lru+'"]),
    (["--policy", "least-stale:cyclic=3"], ["--policy cannot be 'least-stale:cyclic=3'"]),
    (["--policy", "lru+host"], ["copies nothing", "lru+fetch, or lru for the estimator"]),
    (["--policy", "score+host"], ["copies nothing", "score+fetch"]),
    (["--policy", "ema+host-admit"], ["a scheduler says what comes"]),
    (["--policy", "baseline='lru+fetch'\nthreshold=2"], ["threshold has no effect with baseline lru+fetch"]),
    (["--policy", "baseline='spac+fetch'\nestimator='ema'"], ["two orders of eviction"]),
    (["--policy", "baseline=3"], ["--policy cannot be '3+fetch'"]),
    (["--policy", "lru+fetch", "--predict", "token"], ["token has no effect with lru+fetch"]),
    (["--policy", "lru+fetch", "--stock"], ["lru+fetch has no effect with --stock"]),
    (["--cache", "5", "--stock"], ["--cache 5 has no effect with --stock"]),
    (["--samplers", "top_k;foo"], ["there is no 'foo'", "top_k"]),
    (["--log-file", "/nonexistent/x"], ["--log-file cannot be '/nonexistent/x'", "can be written to"]),
    (["--lora-scaled", "a.gguf:0.5,b.gguf:nan"], ["--lora-scaled b.gguf:nan", "the scale is no number"]),
    (["--control-vector-scaled", "a.gguf:inf"], ["--control-vector-scaled a.gguf:inf", "no number"]),
    (["--override-kv", "qwen3moe.expert_used_count=int:99"], ["int:99'", "1 to"]),
    (["--override-kv", "a=int:1,qwen3moe.expert_used_count=int:0"], ["count=int:0'", "1 to"]),
    (["--policy", "lru+fetch", "--ram", "4"], ["lru+fetch needs all experts in memory", "--ram"]),
    (["-f", "/nonexistent"], ["both -p and -f are given"]),
]


@pytest.mark.parametrize(("arguments", "says"), SETTINGS, ids=lambda value: " ".join(value))
def test_settings_that_cannot_be(arguments: list[str], says: list[str], target: Path, tmp_path: Path) -> None:
    device = [] if {"--device", "--rpc"} & set(arguments) else ["--device", "cpu"]
    refused("-m", target, *device, *arguments, folder=tmp_path, says=says)


def test_draft_and_another_drafter(target: Path, tmp_path: Path) -> None:
    arguments = ("-m", target, "-md", target, "--spec-type", "ngram", "--device", "cpu")
    refused(*arguments, folder=tmp_path, says=["--spec-type ngram uses no draft model", "-md"])


def test_prompt_longer_than_the_context(target: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("word " * 100)
    result = CliRunner().invoke(
        app, ["run", "-m", str(target), "--device", "cpu", "--stock", "-f", str(prompt), "-c", "100"]
    )
    assert result.exit_code == 2
    assert "exceeds the available context size (256 tokens)" in result.stderr
    assert result.stdout == ""


def test_missing_prompt(target: Path) -> None:
    result = CliRunner().invoke(app, ["run", "-m", str(target)])
    assert result.exit_code == 2
    assert "give a prompt with -p or -f, or leave both out on a terminal to chat" in result.stderr


@pytest.mark.parametrize("json_file", ["nowhere/out.json", "."])
def test_json_that_cannot_be_written(json_file: str, target: Path, tmp_path: Path) -> None:
    path = str(tmp_path / json_file)
    result = CliRunner().invoke(app, ["run", "-m", str(target), "-p", "x", "--device", "cpu", "--json", path])
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_inspect_refuses_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_text("no")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "bad.gguf")])
    assert result.exit_code == 2
    assert "not a GGUF file" in result.stderr
