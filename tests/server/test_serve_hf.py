"""`pyspac serve -- -hf USER/MODEL`: llama-server's own way to get a model, against a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from fake_hub import Hub, fake_hub
from serving import (
    DRAFT,
    HOST,
    ONE_THREAD,
    TARGET,
    Serve,
    assert_nothing_left,
    complete,
    run_pyspac,
    wait_for,
)

from pyspac.engine.board import Board
from pyspac.errors import ConfigError, ModelError, PyspacError
from pyspac.server import download, download_check
from pyspac.server.build_extras import FILE, build_extras
from pyspac.server.model_identity import model_hash
from pyspac.server.options import ServeOptions

REPO, DRAFT_REPO = "someone/demo-moe-GGUF", "someone/demo-draft-GGUF"
REPOS = {REPO: {"demo-moe-Q4_K_M.gguf": TARGET}, DRAFT_REPO: {"demo-draft-Q8_0.gguf": DRAFT}}
PASSED = ("-np", "2", *ONE_THREAD)


def variables(hub: Hub, folder: Path) -> dict[str, str]:
    """The hub, and a cache for what comes from it."""
    return {"MODEL_ENDPOINT": hub.endpoint, "LLAMA_CACHE": str(folder / "hub")}


def test_a_model_of_the_hub_is_served(tmp_path: Path) -> None:
    """Fetched once, checked, split, with a scheduler; its utilities are kept under the file's own hash."""
    passed = ("-hf", REPO, "-hfd", DRAFT_REPO, "--spec-type", "draft-simple", *PASSED)
    with (
        fake_hub(REPOS) as hub,
        Serve(
            tmp_path,
            "--cache",
            "25%",
            "--speculation",
            "auto",
            passed=passed,
            target=False,
            draft=False,
            variables=variables(hub, tmp_path),
        ) as serve,
    ):
        serve.wait_ready()
        # as soon as the scheduler, which a busy machine lets wait, has found that it pays
        wait_for("drafts", lambda: "draft_n" in complete(serve.port, 160)["timings"])
        with Board.open(serve.board) as board:
            wait_for("decisions", lambda: board.counters["n_decisions"][0] > 1)
            assert board.n_slots == 48
            assert board.counters["n_hit"][0] > 0
            assert (board.n_draft_max >= 0).all()  # drafts are controlled as those of a file are
        assert serve.stop() == 0
        assert_nothing_left(serve)
        assert sum(path.endswith("demo-moe-Q4_K_M.gguf") for path in hub.requests) <= 2  # HEAD and GET
    assert (tmp_path / "cache" / "utilities" / f"{model_hash(TARGET)}.npz").is_file()


@pytest.mark.parametrize("flag", [("--offline",), ()], ids=["offline", "hub gone"])
def test_what_was_fetched_is_served_without_the_hub(tmp_path: Path, flag: tuple[str, ...]) -> None:
    with fake_hub(REPOS) as hub:
        names = variables(hub, tmp_path)
        options = ServeOptions(passed=("-hf", REPO))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in names.items():
                patch.setenv(name, value)
            found = download.find_models(options, programs(), lambda: False)
    assert found.model.read_bytes() == TARGET.read_bytes()
    passed = ("-hf", REPO, *flag, *PASSED)
    with Serve(tmp_path, passed=passed, target=False, draft=False, variables=names) as serve:
        assert complete(serve.wait_ready().port, 8)["tokens_predicted"] == 8


def test_a_draft_repository_without_a_whole_model_is_llama_servers_affair(tmp_path: Path) -> None:
    """Parts for the target's own drafting live in such ones; only their size is not known here."""
    parts = {**REPOS, "someone/parts": {"mtp-demo.gguf": DRAFT}}
    with fake_hub(parts) as hub, pytest.MonkeyPatch.context() as patch:
        for name, value in variables(hub, tmp_path).items():
            patch.setenv(name, value)
        options = ServeOptions(model=TARGET, passed=("-hfd", "someone/parts"))
        assert download.find_models(options, programs(), lambda: False).draft is None


def programs() -> Path:
    from pyspac._native import bin_dir

    return bin_dir()


@pytest.mark.parametrize(
    ("passed", "text"),
    [
        (("-hf", "someone/else"), "-hf someone/else could not be fetched"),
        (("-hf", DRAFT_REPO), "dense model"),
        (("-hf", REPO, "-m", "x.gguf"), "give -m"),
        (("-hf", REPO, "-hff", "missing.gguf"), "could not be fetched"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(tmp_path: Path, passed: tuple[str, ...], text: str) -> None:
    with fake_hub(REPOS) as hub:
        done = run_pyspac(
            "serve",
            "--device",
            "emulated",
            "--",
            *passed,
            cache_dir=tmp_path,
            variables=variables(hub, tmp_path),
        )
    assert done.returncode == 2
    assert text in done.stderr
    assert "starting" not in done.stderr


def fetch(folder: Path, names: dict[str, str], *passed: str) -> CompletedProcess[str]:
    """Of a model that cannot be had: what is said."""
    done = run_pyspac("serve", "--device", "emulated", *passed, cache_dir=folder, variables=names)
    assert done.returncode == 2
    assert "starting" not in done.stderr
    return done


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    names = {"MODEL_ENDPOINT": f"http://{HOST}:1/", "LLAMA_CACHE": str(tmp_path / "hub")}
    done = fetch(tmp_path, names, "-hf", REPO)
    assert f"http://{HOST}:1/api/models/{REPO}/refs cannot be reached" in done.stderr
    assert "check the connection" in done.stderr


@pytest.mark.parametrize(
    ("status", "passed", "text"),
    [
        (404, ("-hf", "someone/else"), "there is no such name"),
        (401, ("-hf", "someone/gated"), "HF_TOKEN has to open"),
        (503, ("-hf", "someone/else"), "answers with status 503"),
        (404, ("-hf", f"{REPO}:Q8_0"), "check the name of the file or of the quantisation"),
        (404, ("-hf", REPO, "--", "--offline"), "it was not fetched before"),
    ],
)
def test_why_a_model_cannot_be_had(tmp_path: Path, status: int, passed: tuple[str, ...], text: str) -> None:
    with fake_hub(REPOS) as hub:
        hub.status = status
        assert text in fetch(tmp_path, variables(hub, tmp_path), *passed).stderr


def test_a_token_is_for_the_hub_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for whoever an address of a file names."""
    monkeypatch.setenv("HF_TOKEN", "t")
    asked: list[tuple[str, str | None]] = []

    def ask(url: str, token: str | None, **_: object) -> tuple[str, bytes]:
        asked.append((url, token))
        return "no", b""

    monkeypatch.setattr(download_check, "_ask", ask)
    for source in (["-mu", "https://x.example/m.gguf"], ["-hf", REPO]):
        download._why(source, ServeOptions(passed=tuple(source)))
    assert asked[0] == ("https://x.example/m.gguf", None)
    assert asked[1][1] == "t"


def test_a_model_whose_files_are_refused(tmp_path: Path) -> None:
    """A gated one: the hub lists its files, and wants a token for each."""
    with fake_hub(REPOS) as hub:
        hub.file_status = 403
        said = fetch(tmp_path, variables(hub, tmp_path), "-hf", REPO).stderr
    assert "refuses with status 403: there is no such name, or HF_TOKEN has to open it" in said


def test_what_answers_is_no_hub(tmp_path: Path) -> None:
    """The page of a hotel, which asks for a room's number."""
    with fake_hub(REPOS) as hub:
        hub.page = b"<html>Welcome</html>"
        said = fetch(tmp_path, variables(hub, tmp_path), "-hf", REPO).stderr
    assert "is no hub's: check the connection, a proxy" in said


def test_offline_asks_no_hub(tmp_path: Path) -> None:
    """Not even where the model's defaults are looked up."""
    with fake_hub(REPOS) as hub:
        run = ("run", REPO, "--offline", "-p", "x", "-n", "2")
        done = run_pyspac(*run, cache_dir=tmp_path, variables=variables(hub, tmp_path))
        assert hub.requests == []
    assert done.returncode == 2
    assert "it was not fetched before, and --offline fetches nothing" in done.stderr


def test_what_was_never_compared_is_compared_offline(tmp_path: Path) -> None:
    """As of a command that was killed when the file was there."""
    with fake_hub(REPOS) as hub:
        names = variables(hub, tmp_path)
        pulled = run_pyspac("pull", REPO, cache_dir=tmp_path, variables=names)
    file = Path(pulled.stdout.strip()).resolve()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    run = ("run", REPO, "--offline", "-p", "x", "-n", "2")
    done = run_pyspac(*run, cache_dir=tmp_path, variables=names)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is damaged: its sha256 is" in done.stderr


def test_a_damaged_file_is_refused_and_fetched_anew(tmp_path: Path) -> None:
    """One byte is another than the hub's sha256 says."""
    with fake_hub(REPOS) as hub:
        names = variables(hub, tmp_path)
        hub.is_damaging = True
        done = fetch(tmp_path, names, "-hf", REPO)
        assert "is damaged: its sha256 is" in done.stderr
        hub.is_damaging = False
        shown = run_pyspac("inspect", "-hf", REPO, "--json", "-", cache_dir=tmp_path, variables=names)
        assert json.loads(shown.stdout)["n_expert"] == 32


def test_a_file_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it changes, whoever changed it."""
    monkeypatch.setenv("PYSPAC_CACHE_DIR", str(tmp_path / "cache"))
    content = b"GGUF"
    file = tmp_path / hashlib.sha256(content).hexdigest()
    file.write_bytes(content)
    (tmp_path / "model.gguf").symlink_to(file)
    read: list[Path] = []
    sha256 = download_check._sha256
    monkeypatch.setattr(download_check, "_sha256", lambda path, stop: read.append(path) or sha256(path, stop))
    for _ in range(2):
        download_check.check_contents(tmp_path / "model.gguf", lambda: False)
    assert read == [file]
    file.write_bytes(b"GGUE")
    os.utime(file, ns=(1, 1))
    with pytest.raises(ModelError, match="is damaged"):
        download_check.check_contents(tmp_path / "model.gguf", lambda: False)
    assert not file.exists()


def test_a_download_can_be_stopped(tmp_path: Path) -> None:
    with fake_hub(REPOS, is_stuck=True) as hub:
        names = variables(hub, tmp_path)
        with Serve(tmp_path, passed=("-hf", REPO), target=False, draft=False, variables=names) as serve:
            wait_for("the download", lambda: any("/resolve/" in path for path in hub.requests))
            assert serve.stop(signal.SIGINT) == 130


# ---- without HTTPS


@pytest.fixture
def plain_build(tmp_path: Path) -> Path:
    """A folder of programs without HTTPS."""
    (tmp_path / FILE).write_text(json.dumps({"https": False, "ui": False}))
    return tmp_path


@pytest.mark.parametrize(
    "passed",
    [
        ("-hf", REPO),
        ("-mu", "https://example.org/model.gguf"),
        ("-dr", "gemma3"),
        ("-hf", REPO, "-hfd", DRAFT_REPO),
    ],
)
def test_without_https_a_download_is_refused(
    plain_build: Path, monkeypatch: pytest.MonkeyPatch, passed: tuple[str, ...]
) -> None:
    monkeypatch.delenv("MODEL_ENDPOINT", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match=r"without HTTPS.*libssl-dev.*make configure build"):
        download.find_models(ServeOptions(passed=passed), plain_build, lambda: False)


@pytest.mark.parametrize("passed", [("-hf", REPO, "--offline"), ("-mu", f"http://{HOST}/model.gguf")])
def test_without_https_what_needs_none_goes_on(plain_build: Path, passed: tuple[str, ...]) -> None:
    with pytest.raises(PyspacError, match="llama-download is missing"):
        download.find_models(ServeOptions(passed=passed), plain_build, lambda: False)


def test_a_build_that_does_not_say_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(PyspacError, match="make build"):
        build_extras(tmp_path)


def test_files_are_not_fetched() -> None:
    options = ServeOptions(model=TARGET, draft=DRAFT)
    assert download.find_models(options, Path("/nowhere"), lambda: False).model == TARGET


# ---- every command


def test_the_flag_is_the_servers_own_too(tmp_path: Path) -> None:
    with (
        fake_hub(REPOS) as hub,
        Serve(
            tmp_path,
            "-hf",
            REPO,
            passed=PASSED,
            target=False,
            draft=False,
            variables=variables(hub, tmp_path),
        ) as serve,
    ):
        assert complete(serve.wait_ready().port, 8)["tokens_predicted"] == 8


def test_a_model_by_name_in_every_command(tmp_path: Path) -> None:
    """Fetched by the first one; the others find it, and `pyspac models` lists it."""
    with fake_hub(REPOS) as hub:
        names = variables(hub, tmp_path)
        pair = ("-hf", REPO, "-hfd", DRAFT_REPO)
        run = ("run", *pair, "-p", "def f(", "-n", "4", "-t", "1", "--json", "-")
        done = run_pyspac(*run, cache_dir=tmp_path, variables=names)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["n_tokens"] == 4
        assert found["spec_type"] == "draft"
    listed = run_pyspac("models", "--json", "-", cache_dir=tmp_path, variables=names)
    rows = json.loads(listed.stdout)["models"]
    assert [row["name"] for row in rows] == [f"{DRAFT_REPO}:Q8_0", f"{REPO}:Q4_K_M"]
    assert [row["n_expert"] for row in rows] == [0, 32]
    assert Path(rows[1]["path"]).read_bytes() == TARGET.read_bytes()
    table = run_pyspac("models", cache_dir=tmp_path, variables=names)
    assert "32, 4 used" in table.stdout
    shown = run_pyspac("inspect", "-hf", f"{REPO}:Q4_K_M", "--json", "-", cache_dir=tmp_path, variables=names)
    assert json.loads(shown.stdout)["n_expert"] == 32
    Path(rows[0]["path"]).resolve().unlink()  # a broken entry hides no other
    table = run_pyspac("models", cache_dir=tmp_path, variables=names)
    assert table.returncode == 0, table.stderr
    assert "32, 4 used" in table.stdout
    assert "cannot be used" in table.stdout


def test_a_name_is_a_word(tmp_path: Path) -> None:
    """`pull` fetches it; without the hub `run` finds it, and `list` is `models`."""
    name = f"{REPO}:Q4_K_M"
    with fake_hub(REPOS) as server:
        names = variables(server, tmp_path)
        pulled = run_pyspac("pull", name, cache_dir=tmp_path, variables=names)
        assert pulled.returncode == 0, pulled.stderr
        assert Path(pulled.stdout.strip()).read_bytes() == TARGET.read_bytes()
    run = ("run", name, "--offline", "-p", "def f(", "-n", "4", "-t", "1")
    done = run_pyspac(*run, cache_dir=tmp_path, variables=names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    listed = run_pyspac("list", cache_dir=tmp_path, variables=names)
    assert name in listed.stdout


def test_no_model_was_fetched_yet(tmp_path: Path) -> None:
    done = run_pyspac("models", cache_dir=tmp_path, variables={"LLAMA_CACHE": str(tmp_path / "hub")})
    assert done.returncode == 0
    assert "pyspac pull USER/MODEL fetches one" in done.stdout


def test_a_cache_that_cannot_be_listed(tmp_path: Path) -> None:
    (tmp_path / "hub").touch()
    done = run_pyspac("models", cache_dir=tmp_path, variables={"LLAMA_CACHE": str(tmp_path / "hub")})
    assert done.returncode == 2
    assert f"Not a directory [{tmp_path / 'hub'}]" in done.stderr
    assert "name another one with LLAMA_CACHE" in done.stderr
    assert "make build" not in done.stderr


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("inspect",), ("serve",)], ids=lambda text: text[0])
def test_a_command_without_a_model(command: tuple[str, ...], tmp_path: Path) -> None:
    done = run_pyspac(*command, cache_dir=tmp_path)
    assert done.returncode == 2
    assert "there is no model: give FILE.gguf or USER/MODEL" in done.stderr
