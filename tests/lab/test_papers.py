"""The papers' figures: each has a command that says whether the order agrees, and a row of docs/papers.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "papers"
WANTED = {
    "moe_spac": ["Table 2", "Table 4", *(f"Figure {n}" for n in (4, 5, 7, 8, 9))],
    "cascade": [f"Figure {n}" for n in (13, 15, 16, 18)],
    "sp_moe": ["Table 3", *(f"Figure {n}" for n in (9, 10, 11, 12, 13, 14))],
    "specmd": ["Figure 4", "Figure 6", "Figure 8", "Figure 9", "Table 2"],
    "gamma_tolerance": ["Figure 1", "Figure 2", "Table 1"],
}
IN_SECONDS = {
    "moe_spac": "Figure 7",
    "cascade": "Figure 15",
    "sp_moe": "Figure 14",
    "specmd": "Figure 9",
    "gamma_tolerance": "Figure 1",
}


@pytest.fixture(scope="module")
def claims() -> Iterator[Any]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield import_module("claims")
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
                sys.modules.pop(name)


def claim(claims: Any, paper: dict[str, float], ours: dict[str, float], **fields: Any) -> Any:
    return claims.Claim(what="speed", source="table 1", paper=paper, ours=ours, **fields)


def test_the_order_is_that_of_all_pairs_that_differ(claims: Any) -> None:
    # a < b < c in the paper; ours has b and c the other way round, d is only ours
    found = claim(claims, {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 5.0, "b": 9.0, "c": 7.0, "d": 1.0})
    assert found.pairs() == (2, 3, ["b, c"])
    assert found.verdict() == "2 of 3 pairs"


def test_what_the_paper_has_alike_says_nothing(claims: Any) -> None:
    found = claim(claims, {"a": 100.0, "b": 101.0, "c": 200.0}, {"a": 2.0, "b": 1.0, "c": 3.0})
    assert found.pairs() == (2, 2, [])
    assert found.verdict() == "agrees"
    assert claim(claims, {"a": 1.0}, {"a": 2.0}).verdict() == "no order"


def test_what_differs_in_the_paper_and_not_here_is_another_order(claims: Any) -> None:
    assert claim(claims, {"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 3.0}).pairs()[0] == 0


@pytest.mark.parametrize("module", WANTED)
def test_every_figure_has_a_command_and_a_row(claims: Any, module: str) -> None:
    assert set(import_module(module).FIGURES) == set(WANTED[module])
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    part = next(part for part in page.split("\n## ")[1:] if f"python benchmarks/papers/{module}.py" in part)
    assert [name for name in WANTED[module] if f"\n| {name}: " not in part] == []


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / f"{module}.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("module", IN_SECONDS)
def test_one_figure_of_each_paper_runs(module: str) -> None:
    done = run(module, "--figure", IN_SECONDS[module], "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["claims"]
    assert {row["figure"] for row in rows} == {IN_SECONDS[module]}
    assert all(len(row["ours"]) > 1 and row["source"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--figure", "Figure 99"), "Figure 7"), (("--traces", "/nowhere"), "qwen.route.csv")],
)
def test_bad_arguments(arguments: tuple[str, str], said: str) -> None:
    done = run("moe_spac", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_synthetic_routing_repeats_itself_and_has_guesses(claims: Any) -> None:
    routing = import_module("synthetic_routing")
    one, other = (routing.make_trace.__wrapped__("Mixtral-8x7B", n_token=6) for _ in range(2))
    assert (one.experts == other.experts).all()
    assert one.draft_logits is not None
    first = one.draft_logits.astype(float).argmax(axis=2) == one.experts[..., 0]
    assert 0.75 < first.mean() < 1
