"""Prompts that outlive the server (`--keep`): the same text as without, never of another model, and no broken
file after a `kill -9`."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_models
import pytest
from serving import DRAFT, ONE_THREAD, TARGET, Serve, post, run_pyspac, wait_for

from pyspac.engine.engine import tokens_per_expert
from pyspac.errors import ConfigError
from pyspac.server.keep import prepare_folder, state_key
from tools.kill_keeping import kill_at_random

TEXT = "def parse(self, text):\n    return [line.split() for line in text.splitlines() if line]\n" * 12
OTHER = "import os\nimport sys\n\n\nclass Reader:\n    def read(self, path):\n        return path\n" * 12
MORE = "\n\ndef main():\n"
N_PREDICT = 12


@contextmanager
def serving(
    tmp_path: Path, folder: Path | None, *arguments: str, passed: Sequence[str] = ("-np", "2"), **rest: Any
) -> Iterator[Serve]:
    keep = [] if folder is None else ["--keep", str(folder)]
    rest = {"draft": False, "device": "none"} | rest
    passed = (*passed, *ONE_THREAD)
    with Serve(tmp_path, "-c", "1024", "--drain", "0", *keep, *arguments, passed=passed, **rest) as serve:
        yield serve.wait_ready(scheduler=False)


def ask(serve: Serve, prompt: str, **more: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were there already."""
    body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "ignore_eos": True, **more}
    answer = post(serve.port, "/completion", body)
    return str(answer["content"]), int(answer["timings"]["cache_n"])


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prompt"))


def wait_kept(folder: Path, n: int = 1) -> None:
    wait_for("a prompt to be kept", lambda: len(kept(folder)) >= n)


def models(tmp_path: Path, name: str) -> tuple[Path, Path]:
    if name == "demo":
        return TARGET, DRAFT
    path = tmp_path / f"{name}.gguf"
    gguf_models.write_model(path, name)
    return path, DRAFT


@pytest.mark.parametrize("name", ["demo", "demo, draft", "gpt-oss", "qwen3next"])
def test_the_next_server_goes_on(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same text as the one that never ended: attention, with a draft, a window, and recurrent."""
    if tokens_per_expert():  # tiles of bf16: what is left of a prompt is computed otherwise than the whole
        monkeypatch.setenv("PYSPAC_KERNELS", "avx512")
    folder = tmp_path / "kept"
    name, _, draft = name.partition(", ")
    how: dict[str, Any] = {"pair": models(tmp_path, name), "draft": bool(draft)}
    start = TEXT if name == "demo" else TEXT[:200]  # of bytes, where a vocabulary has no words
    with serving(tmp_path, folder, **how) as serve:
        first, n_first = ask(serve, start)
        assert n_first == 0
        wait_kept(folder)
        longer = ask(serve, start + first + MORE)
        assert longer[1] > 50
        serve.stop()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    longest = [start + first + MORE + longer[0] + MORE]
    with serving(tmp_path, folder, **how) as serve:
        again = ask(serve, start + first + MORE)
        assert again[0] == longer[0]
        assert again[1] >= longer[1]
        third = ask(serve, *longest)
        serve.stop()
    with serving(tmp_path, None, **how) as serve:
        alone = ask(serve, *longest)
        assert alone == (third[0], 0)
        assert third[1] > longer[1]


def test_another_model_or_setting_begins_anew(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with serving(tmp_path, folder) as serve:
        text, _ = ask(serve, TEXT)
        serve.stop()
    n = len(kept(folder))
    assert n == 1
    with serving(tmp_path, folder, passed=("-np", "2", "-ctk", "q8_0")) as serve:
        assert ask(serve, TEXT)[1] == 0
        serve.stop()
    assert len(kept(folder)) == 2
    copied = tmp_path / "other.gguf"
    copied.write_bytes(TARGET.read_bytes())
    with serving(tmp_path, folder, pair=(copied, DRAFT)) as serve:
        assert ask(serve, TEXT)[1] == 0
        serve.stop()
    with serving(tmp_path, folder, passed=("-np", "1", "--temp", "0.5", "--alias", "x")) as serve:
        assert ask(serve, TEXT)[0] == text
        assert ask(serve, TEXT + MORE)[1] > 50


def test_who_asks_for_no_cache_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with serving(tmp_path, folder) as serve:
        ask(serve, TEXT, cache_prompt=False)
        serve.stop()
    assert kept(folder) == []
    with serving(tmp_path, folder) as serve:
        ask(serve, TEXT)
        serve.stop()
    with serving(tmp_path, folder) as serve:
        assert ask(serve, TEXT, cache_prompt=False)[1] == 0
        assert ask(serve, OTHER)[1] == 0  # another prompt shows nothing of it


def test_what_takes_its_place_is_kept_before(tmp_path: Path) -> None:
    """One slot, two prompts without a pause between them."""
    folder = tmp_path / "kept"
    with serving(tmp_path, folder, passed=("-np", "1")) as serve:
        ask(serve, TEXT)
        ask(serve, OTHER)
        serve.stop()
    with serving(tmp_path, folder, passed=("-np", "1")) as serve:
        assert ask(serve, TEXT + MORE)[1] > 50
        assert ask(serve, OTHER + MORE)[1] > 50


def test_the_size_is_held(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with serving(tmp_path, folder, "--keep-mib", "1") as serve:
        for i in range(6):
            ask(serve, f"# {i}\n{OTHER}")
        serve.stop()
    sizes = [path.stat().st_size for path in kept(folder)]
    assert sizes
    assert sum(sizes) <= 1 << 20


def test_a_state_larger_than_the_limit_costs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    small, large = OTHER[:300], TEXT + OTHER
    how: dict[str, Any] = {"passed": ("-np", "1")}
    with serving(tmp_path, folder, "--keep-mib", "1", **how) as serve:
        text, _ = ask(serve, large)
        small_text, _ = ask(serve, small)
        assert ask(serve, large)[0] == text
        serve.stop()
        assert "is not kept" in serve.log()
    assert all(path.stat().st_size < 1 << 20 for path in kept(folder))
    with serving(tmp_path, folder, "--keep-mib", "1", **how) as serve:
        again, n_cached = ask(serve, small)
        assert (again, n_cached > 50) == (small_text, True)
        assert ask(serve, large) == (text, 0)


def test_without_a_cache_in_memory(tmp_path: Path) -> None:
    """`--cache-ram 0`: what leaves a slot is kept on disk all the same, and found again at once."""
    folder = tmp_path / "kept"
    passed = ("-np", "1", "--cache-ram", "0")
    with serving(tmp_path, folder, passed=passed) as serve:
        text, _ = ask(serve, TEXT)
        wait_kept(folder)
        ask(serve, OTHER)
        again, n_cached = ask(serve, TEXT)
        assert (again, n_cached > 50) == (text, True)
        serve.stop()
    with serving(tmp_path, folder, passed=passed) as serve:
        again, n_cached = ask(serve, TEXT)
        assert (again, n_cached > 50) == (text, True)
        assert ask(serve, OTHER)[1] > 50


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_folder_of_another_user() -> None:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own are closed to others
        Path(parent).chmod(0o755)
        folder = Path(parent) / "kept"
        folder.mkdir(mode=0o700)
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            try:
                prepare_folder(folder)
            except ConfigError as error:
                os._exit("a folder that can be written" not in str(error))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with serving(tmp_path, folder) as one, serving(tmp_path, folder) as two:
        text, _ = ask(one, TEXT)
        wait_kept(folder)
        again, n_cached = ask(two, TEXT)
        assert (again, n_cached > 50) == (text, True)
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(ask, serve, OTHER) for serve in (one, two)]
            assert both[0].result()[0] == both[1].result()[0]


def test_killed_at_random_moments(bin_dir: Path, tmp_path: Path) -> None:
    done = kill_at_random(bin_dir, tmp_path, 10)
    assert done["restored"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keep-mib", "100"], "--keep-mib 100 has no effect without --keep"),
        (["--keep", "{tmp}/kept", "--keep-mib", "0"], "--keep-mib"),
        (["--keep", "{tmp}/a-file"], "a folder that can be written"),
        (["--keep", "/proc/none"], "a folder that can be written"),
        (["--keep", "{tmp}/open"], "chmod 700"),
        (["--keep", "{tmp}/open"], "--keep cannot be '/"),
    ],
)
def test_folders_and_sizes_that_cannot_be(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    words = [word.format(tmp=tmp_path) for word in arguments]
    done = run_pyspac("serve", "-m", str(TARGET), *words, cache_dir=tmp_path / "cache")
    assert done.returncode == 2
    assert said in done.stderr


def test_what_a_state_depends_on(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"a" * 100)

    def key(*argv: str, **environ: str) -> str:
        return state_key(["llama-server", *argv], environ, TARGET, 4096)

    same = [
        key(), key("-m", "elsewhere.gguf", "--port", "1", "--metrics"), key("-t", "3", "-np", "7"),
        key(LLAMA_ARG_PORT="1", HOME="/x"),
    ]  # fmt: skip
    others = [
        key("-ctk", "q8_0"), key("--rope-scale", "2"), key("--lora", str(adapter)), key("--swa-full"),
        key("--some-new-flag"), key(LLAMA_ARG_ROPE_SCALE="2"), key(PYSPAC_LOSSY="drop:2"),
        state_key(["x"], {}, DRAFT, 4096),
    ]  # fmt: skip
    assert len(set(same)) == 1
    assert len({*same, *others}) == 1 + len(others)
    adapter.write_bytes(b"b" * 100)
    assert key("--lora", str(adapter)) not in others
