"""pyspac profile: the arithmetic by hand, the advice, and one short run on the demo pair."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands.demo import DRAFT, TARGET
from pyspac.commands.profile_figure import draw
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams
from pyspac.forward.sequences import Sequences
from pyspac.speculation.sweep import Sweep
from pyspac.speculation.tolerance import Profile, Samples


def profile(*costs: float, delta: float = 0.0) -> Profile:
    """T(1), T(2), ... in plain steps."""
    verify = {n: Samples((1000 * x,) * 3) for n, x in enumerate(costs, 1)}
    return Profile(verify=verify, drafters={"n-gram": Samples((1000 * delta,))})


def test_by_hand() -> None:
    """tau(2) = 1 / 1.6; S(1, 0.8) = 1.8 * 0.625 = 1.125 and, with delta 0.1, 1.125 / 1.0625."""
    found = profile(1.0, 1.6, 2.1)
    assert found.tau(2) == pytest.approx(0.625)
    assert found.speedup(1, 0.8, "n-gram") == pytest.approx(1.125)
    assert profile(1.0, 1.6, delta=0.1).speedup(1, 0.8, "n-gram") == pytest.approx(1.125 / 1.0625)
    assert found.break_even(1, "n-gram") == pytest.approx(0.6, abs=1e-5)
    assert found.surface("n-gram").shape == (2, 21)
    assert found.best_n_draft(0.8, "n-gram") == 2  # 2.44 / 2.1 = 1.16
    assert found.best_n_draft(0.3, "n-gram") == 0


@pytest.mark.parametrize(
    ("costs", "says"),
    [
        ((1.0, 1.6, 2.1), "speculate up to K=2 when acceptance is above 0.66"),
        ((1.0, 1.75, 2.5), "speculate only when acceptance is above 0.82, up to K=2"),
        ((1.0, 2.0, 3.0), "do not speculate"),
    ],
)
def test_advice(costs: tuple[float, ...], says: str) -> None:
    assert says in profile(*costs).advice()


def test_spread_and_noise() -> None:
    samples = Samples((100.0, 110.0, 120.0, 130.0, 140.0))
    assert samples.median_us == 120
    assert samples.quartiles_us() == (110, 130)
    assert samples.spread == pytest.approx(10 / 120)
    assert not profile(1.0, 1.6).is_noisy


def test_figure(tmp_path: Path) -> None:
    draw(profile(1.0, 1.6, 2.1), tmp_path / "out.png", "title")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_by_hand() -> None:
    """tau(5) = 1 / 2 with one sequence, so two tokens per step break even; four with eight."""
    places = {(1, 128): profile(1, 1, 1, 1, 2), (8, 128): profile(3, 4, 5, 6, 12)}
    sweep = Sweep(places)
    assert (sweep.sequences, sweep.contexts, sweep.widths) == ([1, 8], [128], [1, 2, 3, 4, 5])
    row = sweep.rows()[-1]
    assert (row["sequences"], row["context"], row["width"], row["tau"]) == (8, 128, 5, 0.25)
    assert "more than 2.0 tokens with 1 in a batch after 128 tokens, or 4.0 tokens with 8" in sweep.advice()


@pytest.mark.model
def test_sweep_command(tmp_path: Path) -> None:
    """Four sequences use more experts at once than one, as each reads another text."""
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["-m", str(TARGET), "-t", "1", "--device", "emulated", "--cache", "50%", "--rounds", "2"]
    places = ["--sequences", "4,1", "--contexts", "32,64", "--width-max", "5"]
    result = CliRunner().invoke(app, ["profile", *arguments, *places, "--json", str(out), "--png", str(png)])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = json.loads(out.read_text())["rows"]
    assert [(row["sequences"], row["context"], row["width"]) for row in rows] == [
        (m, c, n) for m in (1, 4) for c in (32, 64) for n in (1, 2, 3, 5)
    ]
    experts = {(row["sequences"], row["width"]): row["n_experts"] for row in rows if row["context"] == 64}
    assert experts[1, 1] == pytest.approx(4.0)
    assert 4.0 < experts[4, 1] < experts[4, 5], "batches of 20 tokens are split, too"
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.model
def test_the_narrowest_sweep() -> None:
    """Going on in the text needs more tokens than the widest pass has, and no room for their logits."""
    arguments = ["-m", str(TARGET), "-t", "1", "--device", "none", "--rounds", "1", "--width-max", "2"]
    result = CliRunner().invoke(app, ["profile", *arguments, "--sequences", "1", "--contexts", "16"])
    assert result.exit_code == 0, result.output
    assert " or " not in result.stdout.rpartition("pays where")[2], "one place: nothing to compare"


@pytest.mark.model
def test_sequences_are_computed_apart() -> None:
    """Each has the logits that it has alone, whatever the others read; what is taken back is gone."""
    rows = [[5, 6, 7, 8], [9, 8, 7, 6]]
    params = ContextParams(n_ctx=64, n_sequences=2, n_outputs_max=4)
    with Model(ModelParams(path=TARGET)) as model, ExitStack() as stack:
        context = stack.enter_context(Context(model, params))
        alone = stack.enter_context(Context(model, replace(params, n_sequences=1)))
        both = stack.enter_context(Sequences(context))
        both.read([row[:2] for row in rows])
        for _ in range(2):
            both.decode([row[2:] for row in rows])
            logits = context.logits(4).copy()
            both.rollback(2)
        assert both.n_past == 2
        for i, row in enumerate(rows):
            alone.clear()
            alone.decode(row[:2], 0)
            assert logits[2 * i : 2 * i + 2] == pytest.approx(alone.decode(row[2:], 2), abs=1e-2)


def test_plain_llama_cpp_has_no_cache() -> None:
    result = CliRunner().invoke(app, ["profile", "-m", str(TARGET), "--stock", "--cache", "5"])
    assert result.exit_code == 2
    assert "--cache 5 has no effect with --stock" in result.output


@pytest.mark.model
@pytest.mark.parametrize("mode", [["--cache", "50%"], ["--stock"]])
def test_command(mode: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["-m", str(TARGET), "-md", str(DRAFT), "--device", "cpu", "-t", "1", "--rounds", "3", *mode]
    result = CliRunner().invoke(app, ["profile", *arguments, "--width-max", "5", "--json", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert set(found["verify_us"]) == {"1", "2", "3", "4", "5"}
    assert found["tau"]["1"] == 1.0
    assert set(found["drafters"]) == {"model", "n-gram"}
    assert len(found["drafters"]["model"]["speedup"]["1"]) == len(found["acceptances"])
    assert "peculate" in found["advice"]
    assert max(map(len, result.stdout.splitlines())) <= 80
    if "--stock" not in mode:
        union = [found["n_experts"][str(n)] for n in range(1, 6)]
        assert union == sorted(union), "more tokens, more experts"
        assert union[0] == pytest.approx(4.0), "one token uses n_expert_used of them"
        assert found["emulated"] is True


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--width-max", "17"], "--width-max"),
        (["--rounds", "0"], "--rounds"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--sequences", "1,x"], "whole numbers with commas between them"),
        (["--sequences", "33"], "--sequences"),
        (["--contexts", "0"], "--contexts"),
        (["--contexts", "128,4096"], "this model's context has 1024 tokens"),
        (["--sequences", "2", "-md", str(DRAFT)], "leave it out"),
        (["--contexts", "9", "--prompt-tokens", "9"], "give one of them"),
        (["--contexts", "9", "-c", "16"], "or more, which 15 rounds after 9 tokens need"),
        (["--png", "/nowhere/at/all.png"], "--png"),
        (["--rounds", "999999"], "999999 rounds after a prompt of 128 tokens need"),
    ],
)
def test_bad_settings(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["profile", "-m", str(TARGET), "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert says in result.output


def test_experts_touched_against_tokens_gained() -> None:
    """Of 0.8 accepted, Omega(1) = 1.8 and Omega(2) = 2.44: 4 experts become 6 and 10."""
    found = replace(profile(1.0, 1.6, 2.1), n_experts={1: 4.0, 2: 6.0, 3: 10.0})
    assert [found.experts_ratio(k) for k in (1, 2)] == [1.5, 2.5]
    assert (found.experts_text() or "").endswith("(a/b, Omega): K=1 1.50<1.80, K=2 2.50>=2.44")
    assert profile(1.0, 1.6, 2.1).experts_text() is None
