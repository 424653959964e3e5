"""`--lossy lowbit:N:FILE` of a command: its bits, what it costs, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_models as models
import pytest
from gguf import GGMLQuantizationType as Type
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.model import expert_copy, memory_tier

MODELS = Path(__file__).resolve().parents[2] / "pyspac" / "models"
DEMO = MODELS / "demo-moe.gguf"
N_USED = 4
ON_DISK = ("-dev", "none", "--ram", "6")
DEVICE = ("-dev", "emulated", "--cache", "25%", "--host-kernels", "spac")
PLACES = pytest.mark.parametrize("place", [ON_DISK, DEVICE], ids=["disk", "device"])

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_copy(tmp_path_factory.mktemp("lowbit") / "low.gguf", DEMO, Type.Q4_0)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_json(*arguments: object) -> dict[str, Any]:
    prompt = ("-p", "def read_header(path):", "-n", 40, "--temp", 0)
    result = invoke("run", "-m", DEMO, *prompt, *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@PLACES
def test_the_text_is_exact_where_it_must_be(place: tuple[str, ...], low: Path) -> None:
    rules = (f"lowbit:{N_USED}:{low}", f"lowbit:0:{DEMO}")
    exact, all_kept, same = (run_json(*place, *more) for more in ((), *(("--lossy", rule) for rule in rules)))
    assert all_kept["token_ids"] == exact["token_ids"] == same["token_ids"]
    assert all_kept["router_weight_kept"] == 1.0
    assert 0.0 < same["router_weight_kept"] < 1.0


def test_what_it_costs_is_limited(low: Path) -> None:
    lossy = (*ON_DISK, "--lossy", f"lowbit:0:{low}", "-n", 300, "--max-kl")
    free = run_json(*lossy, 50)
    limit = free["kl_divergence"]["mean"] / 3
    limited = run_json(*lossy, limit)
    assert 0 < limited["kl_divergence"]["mean"] < 1.2 * limit
    assert free["router_weight_kept"] < limited["router_weight_kept"] < 1.0


def test_it_costs_less_than_to_drop(low: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(Path(__file__).read_text())
    rules = (f"lowbit:{N_USED}:{low}", f"lowbit:1:{low}", f"lowbit:0:{low}", "drop:1")
    options = [part for rule in rules for part in ("--lossy", rule)]
    result = invoke(
        "quality", "-m", DEMO, "-f", tmp_path / "text", *ON_DISK, *options, "-c", 128, "--json", "-"
    )
    assert result.exit_code == 0, result.output
    exact, one, zero, drop = (row["kl_divergence"] for row in json.loads(result.stdout)["rows"])
    assert abs(exact) < 1e-3  # the exact logits are kept in 16 bits
    assert exact < one < zero < drop / 2


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("nowhere.gguf", "nowhere.gguf"),
        ("short.gguf", "short.gguf: this file is truncated: tensor blk.5.ffn_"),
        ("text.gguf", "text.gguf"),
        ("wide.gguf", "wide.gguf: this is no copy of"),
        ("floats.gguf", "the engine has no kernels for F32 (blk.0.ffn_"),
    ],
)
@pytest.mark.parametrize("place", [ON_DISK, DEVICE], ids=["disk", "device"])
def test_other_files_are_refused(
    file: str, says: str, place: tuple[str, ...], low: Path, tmp_path: Path
) -> None:
    if file == "short.gguf":
        (tmp_path / file).write_bytes(low.read_bytes()[:-5000])
    elif file == "text.gguf":
        (tmp_path / file).write_text("text")
    elif file == "wide.gguf":
        models.write_model(tmp_path / file, "mixtral", ((Type.Q8_0,) * 3,))
    elif file == "floats.gguf":
        models.write_copy(tmp_path / file, DEMO, Type.F32)
    assert says in refusal(*place, "--lossy", f"lowbit:1:{tmp_path / file}")


def refusal(*arguments: object) -> str:
    result = invoke("run", "-m", DEMO, "-p", "x", "-n", 2, *arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("rule", "more", "says"),
    [
        ("lowbit:-1:{}", ON_DISK, "give lowbit:N:FILE"),
        ("lowbit:1", ON_DISK, "give lowbit:N:FILE"),
        ("lowbit:0:{}:{}", ON_DISK, "give lowbit:N:FILE"),
        ("lowbit:1:{}", ("-dev", "none"), "needs a device, or experts on disk (--ram)"),
        ("lowbit:1:{}", ("--stock",), "has no effect with --stock"),
        ("lowbit:1:{}", (*DEVICE, "--host-kernels", "ggml"), "needs the engine's kernels"),
    ],
)
def test_bad_input(rule: str, more: tuple[str, ...], says: str, low: Path) -> None:
    assert says in refusal("--lossy", rule.format(low, low), *more)


def test_more_than_there_is(low: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory: for the copy alone, and for it beside what --ram asks for."""
    lossy = ("--lossy", f"lowbit:1:{low}")
    monkeypatch.setattr(memory_tier, "free_memory", lambda: 16 << 20)
    run_json("-dev", "none", "--ram", "6", "-c", 64)
    assert "--ram 6: 16 MiB of memory are free" in refusal("-dev", "none", "--ram", "6", "-c", 64, *lossy)
    monkeypatch.setattr(expert_copy, "free_memory", lambda: 1 << 20)
    assert "MiB, and 1 MiB of memory are free: give a file in fewer bits" in refusal(*ON_DISK, *lossy)
