"""`--lossy` of a command that generates, and `pyspac quality`, which says what it costs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import environment, has_ended, wait_for
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands import quality
from pyspac.engine.devices import cpu_device
from pyspac.server.child import run_to_end

MODELS = Path(__file__).resolve().parents[2] / "pyspac" / "models"
DEMO = MODELS / "demo-moe.gguf"
N_USED = 4
ON_DISK = ("-dev", "none", "--ram", "6")
DEVICE = ("-dev", "emulated", "--cache", "25%")

pytestmark = pytest.mark.model


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments: object) -> dict[str, Any]:
    prompt = ("-p", "def read_header(path):", "-n", 40, "--temp", 0)
    result = invoke("run", "-m", DEMO, *prompt, *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("place", [ON_DISK, ("-dev", "emulated", "--cache", "25%")], ids=["disk", "device"])
def test_the_text_is_exact_where_all_are_kept(place: tuple[str, ...]) -> None:
    exact, kept, lossy = (
        run_json(*place, *more) for more in ((), ("--lossy", f"drop:{N_USED}"), ("--lossy", "drop:1"))
    )
    assert exact["router_weight_kept"] is None
    assert kept["token_ids"] == exact["token_ids"]
    assert kept["router_weight_kept"] == 1.0
    assert 0.25 < lossy["router_weight_kept"] < 1.0


def test_what_it_costs_is_limited() -> None:
    """On disk, too; and it says so."""
    lossy = (*ON_DISK, "--lossy", "drop:1", "-n", 300)
    free, limited = (run_json(*lossy, "--max-kl", x) for x in (50, 0.001))
    assert run_json(*ON_DISK, "--lossy", "drop:1")["kl_divergence"] is None
    assert free["kl_divergence"]["mean"] > 0.002 > limited["kl_divergence"]["mean"] > 0.0002
    assert free["router_weight_kept"] < limited["router_weight_kept"] < 1.0
    for found in (free, limited):
        assert found["kl_divergence"]["n_samples"] >= 50
        assert found["kl_divergence"]["of_lossy"] > 0.001


def test_what_is_left_out_is_not_read() -> None:
    exact, lossy = (run_json(*ON_DISK, *more) for more in ((), ("--lossy", "drop:1")))
    assert lossy["tier"]["n_miss"] < 0.5 * exact["tier"]["n_miss"]
    # of the others those in memory are computed: more than each token's best in each of 6 layers
    n_asked = lossy["tier"]["n_hit"] + lossy["tier"]["n_miss"]
    assert n_asked > 1.2 * 6 * len(lossy["token_ids"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "text.txt"
    path.write_text(Path(__file__).read_text() * 2)
    return path


def test_more_is_lost_the_fewer_are_kept(text: Path, tmp_path: Path) -> None:
    png = tmp_path / "speed.png"
    rules = [part for n in (N_USED, 2, 1) for part in ("--lossy", f"drop:{n}")]
    result = invoke(
        "quality", "-m", DEMO, "-f", text, *ON_DISK, *rules, "-c", 128, "--json", "-", "--png", png
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = found["rows"]
    assert min(found["exact_tokens_per_s"], *(row["tokens_per_s"] for row in rows)) > 0
    assert [row["lossy"] for row in rows] == ["drop:4", "drop:2", "drop:1"]
    exact, two, one = rows
    assert abs(exact["kl_divergence"]) < 1e-3
    assert exact["same_top_share"] > 0.995  # the exact logits are kept in 16 bits
    assert 1e-3 < two["kl_divergence"] < one["kl_divergence"]
    assert one["same_top_share"] < 1.0


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, -15), (signal.SIGINT, 130)]
)
def test_what_measures_ends_with_the_command(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is ended; nothing is left of the exact logits, which are gigabytes of a large model."""
    long = tmp_path / "long.txt"
    long.write_text(Path(__file__).read_text() * 200)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    argv = [sys.executable, "-m", "pyspac", "quality", DEMO, "-f", long, *ON_DISK, "--lossy", "drop:2"]
    command = subprocess.Popen(list(map(str, argv)), env=environment(tmp_path))
    try:
        known = psutil.Process(command.pid)

        def measuring() -> list[int]:
            found = known.children(recursive=True)
            return [child.pid for child in found if child.name() == "llama-perplexity"]

        [measures] = wait_for("llama-perplexity", measuring)
        command.send_signal(number)
        assert command.wait(20) == code
        wait_for("the end of llama-perplexity", lambda: has_ended(measures), 10)
        wait_for("an empty folder", lambda: not list((tmp_path / "temporary").iterdir()), 10)
    finally:
        command.kill()
        command.wait()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--lossy", "drop:0"), "--lossy cannot be 'drop:0': give drop:N"),
        (("--lossy", "drop:2", "--ram", "6", "-f", "/nowhere"), "-f cannot be '/nowhere': give a text file"),
        (("--lossy", "drop:2", "--ram", "6", "-f", DEMO), "give a text file in UTF-8 ('utf-8' codec can't"),
        (("--lossy", "drop:2"), "--lossy drop:2 needs a device, or experts on disk (--ram)"),
        (("--lossy", "drop:2", "--ram", "8G"), "all are in memory; give a smaller --ram"),
        (("--lossy", "drop:2", "-m", str(MODELS / "demo-draft.gguf")), "has no experts"),
        (("--lossy", "drop:2", "--ram", "6", "--png", "/nowhere/x.png"), "--png cannot be"),
        (("--lossy", "drop:2", "--ram", "6", "--png", "o.txt"), "give a file whose name ends in .png"),
        (("--lossy", "drop:2", "--ram", "6", "--policy", "spac"), "needs a scheduler, which quality has not"),
        (("--lossy", "drop:2", "-dev", "emulated", "--cache", "1B"), "has no room for one expert"),
        (("--lossy", "drop:2", "--ram", "6", "-c", "65536"), "is too short: give a text of 131072 tokens"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], says: str, text: Path) -> None:
    given = ["-m", DEMO, "-f", text, "-dev", "none"]
    result = invoke("quality", *given, *arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())


@pytest.mark.parametrize("head", ["", "0.00.035.986 ", "0.00.035.986 I "])
def test_a_refusal_is_one_without_llama_cpp_s_own_line(
    text: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """Its log is a thread's: it writes between our lines, and may not write at all as the process ends."""

    def without_it(*args: Any, **kwargs: Any) -> Any:
        done = run_to_end(*args, **kwargs)
        lines = (done.stdout + done.stderr).splitlines()
        lines = [x[x.find("spac: ") :] if "spac: " in x else x for x in lines if "did not attach" not in x]
        return replace(done, stdout="", stderr="\n".join(head * x.startswith("spac: ") + x for x in lines))

    monkeypatch.setattr(quality, "run_to_end", without_it)
    given = ("-dev", "emulated", "--cache", "1B", "--lossy", "drop:2")
    result = invoke("quality", "-m", DEMO, "-f", text, *given)
    assert result.exit_code == 2, result.output
    assert "has no room for one expert" in " ".join(result.stderr.split())


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    """`auto` finds nothing: refused before anything is measured."""
    monkeypatch.setattr(quality, "probe_device", lambda *_: cpu_device(has_cache=False))
    result = invoke("quality", "-m", DEMO, "-f", text, "--lossy", "drop:2")
    assert result.exit_code == 2, result.output
    assert "--lossy drop:2 needs a device, or experts on disk (--ram)" in " ".join(result.stderr.split())


def test_bad_variable(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "many")
    result = invoke("quality", "-m", DEMO, "-f", text, *ON_DISK, "--lossy", "drop:2")
    assert result.exit_code == 2, result.output
    assert "unset LLAMA_ARG_CTX_SIZE" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--lossy", "drop:2x", *ON_DISK), "--lossy cannot be 'drop:2x'"),
        (("--lossy", "substitute:2", *ON_DISK), "--lossy cannot be 'substitute:2'"),
        (("--lossy", "substitute:0.1", *ON_DISK), "substitute:0.1 needs a device, whose experts"),
        (("--lossy", "drop:2", "-dev", "none"), "needs a device, or experts on disk (--ram)"),
        (("--lossy", "drop:2", "--stock"), "has no effect with --stock"),
        (("--policy", "", *DEVICE), "--policy cannot be ''"),
        (("--lossy", "route:2", *DEVICE), "--lossy cannot be 'route:2'"),
        (("--max-kl", "0.1", *ON_DISK), "--max-kl 0.1 limits what --lossy costs: give --lossy"),
        (("--lossy", "drop:2", "--max-kl", "0", *ON_DISK), "--max-kl cannot be 0"),
        (("--lossy", "drop:2", "--max-kl", "nan", *ON_DISK), "--max-kl cannot be nan"),
    ],
)
def test_what_run_refuses(arguments: tuple[str, ...], says: str) -> None:
    result = invoke("run", "-m", DEMO, "-p", "x", "-n", 2, *arguments)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
