"""The most likely mistakes of a new user: exit code 2, and a sentence that says what to do next."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import input_models
import pytest
from conftest import ROOT
from eagle_models import write_eagle3
from gguf import GGUFWriter
from typer.testing import CliRunner

from pyspac import cli
from pyspac.cli import app, misplaced_model
from pyspac.commands.short_options import find_short_with_equals, find_single_dash
from pyspac.engine.devices import gpu_devices

MODELS: Final = ROOT / "pyspac/models"
TARGET, DRAFT = MODELS / "demo-moe.gguf", MODELS / "demo-draft.gguf"
RUN: Final = ("run", "-p", "x", "-n", "2", "-m")
PORT: Final = "{port}"  # one that is taken

Maker = Callable[[Path], object]


def write_part(path: Path, architecture: str, kind: str) -> None:
    """A GGUF file of a kind that is no model."""
    writer = GGUFWriter(path, architecture)
    writer.add_string("general.type", kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_folder(path: Path, *names: str) -> None:
    path.mkdir()
    for name in names:
        (path / name).write_bytes(b"{}")


# what was given as the model: how to make it, and what is said
GIVEN: dict[str, tuple[str, Maker, str]] = {
    "wrong path": ("a/b/model.gguf", lambda path: None, "there is no such file; check the path"),
    "a name of the hub": ("me/model", lambda path: None, "there is no such file"),
    "a folder": ("m", lambda path: write_folder(path), "give the path of a GGUF file"),
    "the folder of a GGUF": ("m", lambda path: write_folder(path, "x.gguf"), "give the GGUF file in it"),
    "a folder of Hugging Face": (
        "m",
        lambda path: write_folder(path, "config.json", "model.safetensors"),
        "-hf USER/MODEL-GGUF",
    ),
    "safetensors": (
        "m.safetensors",
        lambda path: path.write_bytes(b"\x10\0\0\0\0\0\0\0{}"),
        "safetensors file, not a GGUF file; look for a repository whose name ends in -GGUF",
    ),
    "PyTorch": ("m.bin", lambda path: path.write_bytes(b"PK\3\4..."), "convert_hf_to_gguf.py"),
    "git-lfs": (
        "m.gguf",
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "run git lfs pull",
    ),
    "a web page": (
        "m.gguf",
        lambda path: path.write_text("<!DOCTYPE html><html>"),
        "download the file itself",
    ),
    "compressed": ("m.gguf", lambda path: path.write_bytes(b"\x1f\x8b..."), "unpack it first"),
    "old GGML": (
        "m.bin",
        lambda path: path.write_bytes(b"tjgg\3\0\0\0"),
        "download the model again as a GGUF",
    ),
    "empty": ("m.gguf", lambda path: path.write_bytes(b""), "whether there is space on the disk"),
    "text": ("m.gguf", lambda path: path.write_text("hello"), "it begins with b'hell'"),
    "half a download": (
        "m.gguf",
        lambda path: path.write_bytes(TARGET.read_bytes()[:-5000]),
        "this file is truncated",
    ),
    "a LoRA": (
        "m.gguf",
        lambda path: write_part(path, "llama", "adapter"),
        "a LoRA adapter, not a model; give the model that it was trained on",
    ),
    "a projector": (
        "m.gguf",
        lambda path: write_part(path, "clip", "mmproj"),
        "give the file of the language model beside it",
    ),
    "a part that is missing": (
        "split-00001-of-00002.gguf",
        lambda path: input_models.write_split(path.parent, "qwen3moe")[1].unlink(),
        "split-00002-of-00002.gguf",
    ),
    "a second part": (
        "split-00002-of-00002.gguf",
        lambda path: input_models.write_split(path.parent, "qwen3moe"),
        "give the file that ends in -00001-of-00002.gguf",
    ),
}


@pytest.mark.parametrize(("name", "make", "says"), GIVEN.values(), ids=list(GIVEN))
def test_something_else_was_given_as_the_model(name: str, make: Maker, says: str, tmp_path: Path) -> None:
    make(tmp_path / name)
    check(refusal(*RUN, str(tmp_path / name)), says)


NO_SHARES = "--tensor-split cannot be '0,0': give a share of the layers for each device"
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": (("run", "-p", "x"), "there is no model: give FILE.gguf or USER/MODEL"),
    "no prompt": (("run", "-m", str(TARGET)), "give a prompt with -p or -f, or leave both out on a terminal"),
    "a pipe without anything": (("run", "-m", str(TARGET), "-f", "-"), "give a text with -p or -f"),
    "two prompts": ((*RUN, str(TARGET), "-f", "x"), "give the prompt once"),
    "two draft models": (
        (*RUN, str(TARGET), "-md", str(DRAFT), "-hfd", "a/b"),
        f"there are two draft models, -md {DRAFT} and -hfd: give one",
    ),
    "two models": ((*RUN, str(TARGET), "-hf", "a/b"), "give one"),
    "two models, one a word": (
        (*RUN, str(TARGET), "b.gguf"),
        f"two models are given, b.gguf and -m {TARGET}",
    ),
    "two models, one a name": (
        ("run", "-p", "x", str(TARGET), "-hf", "a/b"),
        f"two models are given, {TARGET} and -hf a/b: give one",
    ),
    "two words": (
        ("run", "-p", "x", "a.gguf", "b.gguf"),
        "one model is enough; too many words: b.gguf; a prompt goes behind -p",
    ),
    "a word that is no model": (("run", "-p", "x", "qwen3"), "'qwen3' is no model: there is no such file"),
    "a word that is no file": (("run", "-p", "x", "a/b.gguf"), "a/b.gguf: there is no such file"),
    "a model behind a flag that has no value": (
        ("run", "-p", "x", "--no-mmap", str(TARGET)),
        "there is no model: give FILE.gguf or USER/MODEL, before flags of llama-server",
    ),
    "no model to profile": (("profile",), "there is no model: give FILE.gguf or USER/MODEL"),
    "two models to profile": (("profile", "-m", str(TARGET), "-hf", "a/b"), "give one"),
    "a draft model by name beside a sweep": (
        ("profile", "-m", str(TARGET), "-hfd", "a/b", "--sequences", "2"),
        "-hfd a/b has no effect beside --sequences",
    ),
    "an address as the model": ((*RUN, "https://huggingface.co/a/b"), "-hf USER/MODEL"),
    "an address as the name": (("run", "-p", "x", "-hf", "https://huggingface.co/a/b"), "give USER/MODEL"),
    "a prompt file that is not there": (
        ("run", "-m", str(TARGET), "-f", "/nowhere"),
        "give a text file that can be read",
    ),
    "a GPU that is not there": ((*RUN, str(TARGET), "--device", "CUDA0"), "give auto, none or emulated"),
    "a cache without a GPU": ((*RUN, str(TARGET), "--cache", "25%"), "leave it out, or try the split"),
    "no name to fetch": (("pull", "Qwen3"), "'Qwen3' is no name of Hugging Face: give USER/MODEL"),
    "a context too long": ((*RUN, str(TARGET), "-c", "999999"), "give at most 1024: 1 slot with"),
    "another vocabulary": ((*RUN, str(TARGET), "-md", "{other}"), "use a draft of the same family"),
    "a context too short": ((*RUN, str(TARGET), "-c", "1"), "-c cannot be 1: give 2 or more, or 0"),
    "a context too short, of a server": (("serve", "-m", str(TARGET), "-c", "1"), "give 2 or more, or 0"),
    "a batch too small": ((*RUN, str(TARGET), "-b", "1"), "-b cannot be '1': give 2 or more"),
    "a batch too small, of a server": (
        ("serve", "-m", str(TARGET), "-b", "3"),
        "-b cannot be '3': give 4 or more",
    ),
    "too many server slots": (("serve", "-m", str(TARGET), "-np", "9999"), "-np cannot be 9999: give"),
    "a path too long": ((*RUN, "a" * 300 + ".gguf"), "File name too long; check the path"),
    "a word too long": (("inspect", "a" * 300), "is no model: there is no such file"),
    "a name that no hub has": (("run", "-p", "x", "-hf", "模/型"), "give USER/MODEL"),
    "a broken grammar": ((*RUN, str(TARGET), "--grammar", "root ::= ("), "failed to parse grammar"),
    "a context far too long, of a server": (
        ("serve", "-m", str(TARGET), "-c", "99999999"),
        "give at most 4096: 4 slots with 1024 tokens each",
    ),
    "no threads": ((*RUN, str(TARGET), "--threads", "0"), "-t cannot be 0: give a number of threads from 1"),
    "far too many threads": ((*RUN, str(TARGET), "-t", "100000"), "from 1 to 512"),
    "cores that are not there": ((*RUN, str(TARGET), "-Cr", "0-999"), "of the"),
    "an empty prompt": (("run", "-m", str(TARGET), "-p", ""), "give a text with -p or -f"),
    "an empty prompt file": (("run", "-m", str(TARGET), "-f", "{empty}"), "give a text with -p or -f"),
    "a flag of llama-server's without its value": (
        (*RUN, str(TARGET), "--log-file"),
        '"--log-file": expected value for argument',
    ),
    "a flag that shows something": ((*RUN, str(TARGET), "--", "--help"), "give it to that program"),
    "a prompt file that is no text": (
        ("run", "-m", str(TARGET), "-f", str(TARGET)),
        "give a text file: this one holds zero bytes",
    ),
    "a folder as the prompt": (("run", "-m", str(TARGET), "-f", str(MODELS)), "a text file that can be read"),
    "a prompt too long": (
        (*RUN, str(TARGET), "-p", "x " * 3000),
        "exceeds the available context size (1024 tokens), try increasing it (-c), or shorten the text",
    ),
    "a prompt too long for -c": (
        (*RUN, str(TARGET), "-p", "x " * 300, "-c", "64"),
        "request (301 tokens) exceeds the available context size (256 tokens)",
    ),
    "a draft that is not there": ((*RUN, str(TARGET), "-md", "/nowhere.gguf"), "check the path"),
    "a cache of too much": ((*RUN, str(TARGET), "--cache", "200%"), "a share of all experts (25%)"),
    "a size that is none": ((*RUN, str(TARGET), "--ram", "lots"), "GiB (8G)"),
    "memory for less than one layer": ((*RUN, str(TARGET), "--ram", "1"), "take a smaller quantisation"),
    "no RPC server": (
        (*RUN, str(TARGET), "--rpc", "127.0.0.1:1"),
        "the address of a running ggml-rpc-server",
    ),
    "an address that is not ours": (
        ("serve", "-m", str(TARGET), "--host", "1.2.3.4"),
        "give an address of this machine",
    ),
    "an empty address": (("serve", "-m", str(TARGET), "--host", ""), "--host '' cannot be listened on"),
    "a flag of llama-server with a sign of equality": (
        (*RUN, str(TARGET), "--temp=0.8"),
        "invalid argument: --temp=0.8; a flag of llama-server's takes its value after a space",
    ),
    "one dash too few": ((*RUN, str(TARGET), "-temp", "0"), "long flags begin with two dashes: --temp"),
    "a number with a letter": ((*RUN, str(TARGET), "-c", "4k"), "-c cannot be '4k': give a whole number"),
    "a number close by": ((*RUN, str(TARGET), "-n1O"), "-n cannot be '1O': give a whole number"),
    "a control vector that is not there": (
        (*RUN, str(TARGET), "--control-vector", "/nowhere.gguf"),
        "check the path",
    ),
    "a control vector that is none": (
        (*RUN, str(TARGET), "--control-vector-scaled", f"{TARGET}:1.0"),
        "this is no control vector",
    ),
    "JSON over a model": ((*RUN, str(TARGET), "--json", str(DRAFT)), "another file: this one is a model"),
    "JSON into a folder": ((*RUN, str(TARGET), "--json", str(MODELS)), "a file in a folder"),
    "JSON where nothing can be made": ((*RUN, str(TARGET), "--json", "/proc/x.json"), "a file in a folder"),
    "a figure into nowhere": (("bench", "-m", str(TARGET), "--png", "/nowhere/x.png"), "a file in a folder"),
    "drafts without a drafter": ((*RUN, str(TARGET), "--draft-max", "4"), "give a draft model with -md"),
    "an ngram drafter and a draft model": (
        (*RUN, str(TARGET), "-md", str(DRAFT), "--spec-type", "ngram"),
        "leave out -md",
    ),
    "a wrong template": (
        (*RUN, str(TARGET), "--chat", "--chat-template-file", "{template}"),
        "the supplied chat template is not supported",
    ),
    "JSON into nowhere": (
        (*RUN, str(TARGET), "--json", "/nowhere/x.json"),
        "give a file in a folder that can be written to",
    ),
    "a port that is taken": (
        ("serve", "-m", str(TARGET), "--port", PORT),
        "on 127.0.0.1 is in use: give another --port, or 0 for any free one",
    ),
    "a port that is none": (
        ("serve", "-m", str(TARGET), "--port", "99999"),
        "give a port from 1 to 65535, or 0 for any",
    ),
    "llama-server's own flag": (
        ("serve", "-m", str(TARGET), "--", "--port", "80"),
        "--port cannot be passed on, as pyspac has to know it: give --port, before any --",
    ),
    "an unknown option": (
        (*RUN, str(TARGET), "--ctx", "5"),
        "llama-server refuses what is passed on to it: invalid argument: --ctx; --help-all lists",
    ),
    "an unknown option of a server": (("serve", "-m", str(TARGET), "--ctx", "5"), "invalid argument: --ctx;"),
    "an unknown option of a chat": (("chat", "-m", str(TARGET), "--ctx", "5"), "invalid argument: --ctx;"),
    "an unknown option of a benchmark": (
        ("bench", "-m", str(TARGET), "--ctx", "5"),
        "invalid argument: --ctx;",
    ),
    "an unknown command": (("rum",), "Did you mean 'run'"),
    "an argument that llama-server has not": (
        ("serve", "-m", str(TARGET), "--", "--foo"),
        "invalid argument: --foo; --help-all lists pyspac's own flags, build/*/bin/llama-server --help",
    ),
    "an argument of llama-server without a number": (
        ("serve", "-m", str(TARGET), "--", "-np", "abc"),
        'llama-server refuses what is passed on to it: error while handling argument "-np"',
    ),
    "a value that is none, behind a flag that is given twice": (
        (*RUN, str(TARGET), "-np", "0", "--temp", "0"),
        'passed on to it: error while handling argument "-np": error: invalid value for n_parallel',
    ),
    "a draft as the model": (
        (*RUN, "{head}"),
        "a draft (eagle3) of another model, which cannot run by itself; give that model with -m, and this "
        "file with -md and --spec-type draft-eagle3",
    ),
    "a draft as a server's model": (("serve", "-m", "{head}"), "a draft (eagle3) of another model"),
    "two models for inspect": (("inspect", str(TARGET), "-m", str(TARGET)), "two models are given"),
    "a system message for run": ((*RUN, str(TARGET), "-sys", "x"), "invalid argument: -sys"),
    "a flag after which llama-server ends": (
        (*RUN, str(TARGET), "--list-devices"),
        "--list-devices makes llama-server show something and end: give it to that program",
    ),
    "an address for a server of one's own": (
        (*RUN, str(TARGET), "--port", "8080"),
        "--port is for a server that others use: give it to pyspac serve",
    ),
    "a model beside a server that runs": (
        (*RUN, str(TARGET), "--server", "http://127.0.0.1:1"),
        "--model cannot be given with --server http://127.0.0.1:1, which runs already: leave it out",
    ),
    "a flag for a server that runs": (
        ("run", "-p", "x", "--server", "http://127.0.0.1:1", "--lora", "x"),
        "--lora cannot be given with --server",
    ),
    "an address that is none": (
        ("run", "-p", "x", "--server", "127.0.0.1:8080"),
        "--server cannot be '127.0.0.1:8080': give a URL such as http://127.0.0.1:8080",
    ),
    "shares of nothing: run": ((*RUN, str(TARGET), "-ts", "0,0"), NO_SHARES),
    "shares of nothing: chat": (("chat", "-m", str(TARGET), "-ts", "0,0"), NO_SHARES),
    "shares of nothing: bench": (("bench", "-m", str(TARGET), "-ts", "0,0"), NO_SHARES),
    "shares of nothing: profile": (("profile", "-m", str(TARGET), "-ts", "0,0"), NO_SHARES),
    "shares of nothing: trace": (
        ("trace", "-m", str(TARGET), "-o", "t.parquet", "-p", "x", "-ts", "0,0"),
        NO_SHARES,
    ),
    "shares of nothing: serve": (("serve", "-m", str(TARGET), "--", "-ts", "0,0"), NO_SHARES),
    "shares without devices: profile": (
        ("profile", "-m", str(TARGET), "-ts", "1,1"),
        "--tensor-split 1,1 needs a device with layers, and there is none (no GPU was found, or --device "
        "none or emulated was given): leave it out",
    ),
    "two sizes without a device": (
        (*RUN, str(TARGET), "--cache", "10,20"),
        "--cache 10,20 needs a device that holds experts, and there is none",
    ),
    "two sizes without a device: serve": (
        ("serve", "-m", str(TARGET), "--cache", "10,20"),
        "--cache 10,20 needs a device that holds experts, and there is none",
    ),
    "two links without a device": (
        (*RUN, str(TARGET), "--policy", "copy_gb_s=[1,2]"),
        "--policy needs a device that holds experts, and there is none",
    ),
    "links that are no numbers": (
        (*RUN, str(TARGET), "--policy", "copy_gb_s=[1,'x']"),
        "copy_gb_s cannot be 'x': give a number",
    ),
    "an RPC server by IPv6": (
        (*RUN, str(TARGET), "--rpc", "[::1]:50052"),
        "HOST:PORT with an IPv4 address, or a name that has one, as llama.cpp's RPC knows no IPv6",
    ),
    "a server's RPC server by IPv6": (
        ("serve", "-m", str(TARGET), "--rpc", "[::1]:50052"),
        "as llama.cpp's RPC knows no IPv6",
    ),
    "an empty RPC server": ((*RUN, str(TARGET), "--rpc", ""), "--rpc cannot be '': give HOST:PORT"),
    "an empty RPC server of stock": (
        (*RUN, str(TARGET), "--stock", "--rpc", ""),
        "--rpc cannot be '': give HOST:PORT",
    ),
    "an empty RPC server: serve": (
        ("serve", "-m", str(TARGET), "--rpc", ""),
        "--rpc cannot be '': give HOST:PORT",
    ),
    "rows of a server": (
        ("serve", "-m", str(TARGET), "--", "-sm", "row"),
        "-sm row is not possible, as each device gets whole layers: leave it out",
    ),
    "tensors of a server": (
        ("serve", "-m", str(TARGET), "--", "--split-mode", "tensor"),
        "-sm tensor is not possible",
    ),
    "a word for a number": ((*RUN, str(TARGET), "-n", "many"), "-n cannot be 'many': give a whole number"),
}


@pytest.mark.model
@pytest.mark.parametrize(("arguments", "says"), COMMANDS.values(), ids=list(COMMANDS))
def test_a_command_that_cannot_be(
    arguments: tuple[str, ...], says: str, taken_port: str, tmp_path: Path
) -> None:
    if gpu_devices():
        pytest.skip("this machine has a GPU")
    (tmp_path / "t.jinja").write_text("{% for %}")
    (tmp_path / "empty.txt").write_text("")
    names = {
        PORT: taken_port,
        "{template}": str(tmp_path / "t.jinja"),
        "{empty}": str(tmp_path / "empty.txt"),
    }
    if "{head}" in arguments:
        names["{head}"] = str(write_eagle3(tmp_path / "head.gguf", "qwen3moe"))
    if "{other}" in arguments:
        names["{other}"] = str(input_models.write_dense(tmp_path / "other.gguf"))
    check(refusal(*(names.get(text, text) for text in arguments)), says)


@pytest.fixture
def taken_port() -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield str(listener.getsockname()[1])


def refusal(*arguments: str) -> str:
    """What is said on stderr, as one line; nothing comes out on stdout."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def check(text: str, says: str) -> None:
    """What to do is said, and in a sentence."""
    assert says in text
    assert "allowed:" not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("word", ["m.gguf", "me/model"])
def test_a_model_in_a_commands_place(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert misplaced_model([]) is None
    assert misplaced_model(["run", word]) is None
    monkeypatch.setattr("sys.argv", ["pyspac", word])
    with pytest.raises(SystemExit, match="2"):
        cli.main(app)
    assert f"the first word is a command: try pyspac chat {word}" in capsys.readouterr().err


# flags of llama.cpp that commands without a llama-server have not
@pytest.mark.parametrize("line", ["profile --jinja"])
def test_a_flag_that_is_not_there(line: str) -> None:
    command, *arguments = line.split()
    assert f"No such option: {arguments[0]}" in refusal(command, "-m", str(TARGET), *arguments)


@pytest.mark.parametrize("flags", [("-m",), ("-m", str(TARGET), "-md"), ("-m", str(TARGET), "--json")])
def test_a_folder_that_is_closed_to_this_user(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter all of them, so the system's answer is played."""
    closed, stat = tmp_path / "m.gguf", Path.stat

    def answer(path: Path, **kwargs: bool) -> os.stat_result:
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", answer)
    assert str(closed) in refusal("run", "-p", "x", "-n", "2", *flags, str(closed))


@pytest.mark.parametrize("arguments", [["nothing"], ["top", "--foo"], ["fit", "--json"], ["lab", "nothing"]])
def test_all_errors_begin_alike(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pyspac", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "\npyspac: error: " in f"\n{done.stderr}"
    assert "\nError: " not in f"\n{done.stderr}"


@pytest.mark.model
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_no_room_for_the_result(tmp_path: Path) -> None:
    """Found when it is written, as a device takes what it is given until then."""
    input_models.write_target(tmp_path / "target.gguf")
    done = CliRunner().invoke(app, [*RUN, str(tmp_path / "target.gguf"), "--json", "/dev/full"])
    assert done.exit_code == 1
    assert "/dev/full: the result was not written (No space left on device)" in done.stderr
    assert "or give another file" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["inspect", str(TARGET)], ["inspect", str(TARGET), "--json", "-"], ["--version"], ["run", "--help"]],
)
def test_stdout_that_is_full_or_closed(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pyspac", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "pyspac: error: the output cannot be written (No space left on device)\n"
    closed = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_while_the_command_line_is_loaded_ends_quietly(tmp_path: Path) -> None:
    """Whoever is being imported: here a stand-in for the first library."""
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"
    )
    command = [sys.executable, "-m", "pyspac", "run"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("args", "ways"),
    [
        (("run", "-p=-fa"), '-p "-fa" or --prompt="-fa"'),
        (("run", "-p", "x", "-n=5"), '-n "5" or --n-predict="5"'),
        (("serve", "-m=x.gguf"), '-m "x.gguf" or --model="x.gguf"'),
    ],
)
def test_a_short_option_takes_its_value_without_an_equals_sign(args: tuple[str, ...], ways: str) -> None:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 2
    given = args[-1]
    assert f"{given}: after a short option comes its value, without =: give {ways}" in result.output


@pytest.mark.parametrize("args", [("-p", "-n=5"), ("-p-fa",), ("--prompt=-fa",), ("-md=x",), ("--", "-n=5")])
def test_other_equals_signs_are_left_alone(args: tuple[str, ...]) -> None:
    assert find_short_with_equals(args, {"-p", "-n", "--prompt", "-md"}) is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "-m", str(TARGET), "-p", "x", "-temp", "1"), "long flags begin with two dashes: --temp"),
        (("profile", "-threads=3"), "profile has no option -threads: give --threads"),
    ],
)
def test_a_long_option_with_one_dash_is_named(args: tuple[str, ...], said: str) -> None:
    """-temp would be -t emp: threads."""
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 2
    assert said in result.output


def test_values_and_names_of_one_dash_are_left_alone() -> None:
    known, with_value = {"--temp", "-p", "-hf", "--hf"}, {"-p", "-hf"}
    for arguments in (["-p", "-temp"], ["-hf", "a/b"], ["--", "-temp"], ["-x"]):
        assert find_single_dash(arguments, known, with_value) is None


@pytest.mark.parametrize("flag", ["-n", "-c"])
def test_a_number_beyond_llama_cpps_is_refused(flag: str) -> None:
    result = CliRunner().invoke(app, ["run", "-m", str(TARGET), "-p", "x", flag, "9" * 20])
    assert result.exit_code == 2
    assert f"{flag} cannot be {'9' * 20}: give a whole number from" in result.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cache", "0"), "--cache cannot be '0': give more than 0"),
        (("--draft-max", "0"), "--draft-max cannot be 0: give a whole number from 1 to "),
    ],
)
def test_the_demo_names_what_it_has(flags: tuple[str, ...], said: str) -> None:
    """It has no --stock and no --spec-type."""
    result = CliRunner().invoke(app, ["demo", *flags])
    assert result.exit_code == 2
    assert said in result.output
    assert not re.search("--stock|--spec-type", result.output)


def test_no_file_for_json_is_said() -> None:
    result = CliRunner().invoke(app, ["inspect", "--json", ""])
    assert result.exit_code == 2
    assert "--json cannot be '': give a file" in result.output


def test_inspect_takes_no_threads_below_one() -> None:
    result = CliRunner().invoke(app, ["inspect", "-t", "0"])
    assert result.exit_code == 2
    assert "-t cannot be 0: give a whole number of 1 or more" in result.output
