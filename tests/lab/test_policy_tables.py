"""The tables of docs/policies.md: each has its place, says what it is made of, and is made by one command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pyspac.errors import ConfigError

ACCEPTS = (0.5, 0.7, 0.8, 0.9, 0.97)
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "policies.md"


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import policy_tables

        yield policy_tables
        for name in ("policy_tables", "policy_sections", "policy_bench"):
            sys.modules.pop(name, None)


def write_csv(path: Path, seed: int) -> None:
    """A small trace in the format of the real ones: 3 layers of 16 experts, 2 used, 4 + 24 tokens."""
    rng = np.random.default_rng(seed)
    head = ["# route_trace v1", f"# model={path.stem}.gguf arch=test n_layer=3 n_expert=16 n_expert_used=2"]
    head += [f"# layer={il} expert_bytes=3000000 dense_bytes=1000000" for il in range(3)]
    head += ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    share = 1 / np.arange(1, 17)
    rows = [
        f"0,{int(token >= 4)},{token},{il},{slot},{expert},0.5,0,3000000"
        for token in range(28)
        for il in range(3)
        for slot, expert in enumerate(rng.choice(16, 2, replace=False, p=share / share.sum()))
    ]
    path.write_text("\n".join([*head, *rows]) + "\n")


def arguments(folder: Path, **options: Any) -> argparse.Namespace:
    defaults = {
        "traces": folder, "docs": folder / "policies.md", "figures": folder, "cache": folder / "runs.jsonl",
        "only": "ablation", "jobs": 1, "check": False,
    }  # fmt: skip
    return argparse.Namespace(**(defaults | options))


@pytest.fixture
def folder(tables: ModuleType, tmp_path: Path) -> Path:
    for seed, name in enumerate(tables.FILES.values()):
        write_csv(tmp_path / name, seed)
    (tmp_path / "policies.md").write_text("before\n<!-- table: ablation -->\nold\n<!-- /table -->\nafter\n")
    return tmp_path


def test_every_table_has_its_place_and_says_what_it_is_made_of(tables: ModuleType) -> None:
    text = DOCS.read_text(encoding="utf-8")
    found = {match["name"]: match[0] for match in tables.MARKED.finditer(text)}
    assert found.keys() == tables.SECTIONS.keys()
    for name, body in found.items():
        assert "Replayed:" in body, name
        assert "Predicted:" in body, name
        assert ("assumed 0." in body) == ("Assumed:" in body), name


def test_figures_are_shown_and_made_by_the_command(tables: ModuleType) -> None:
    shown = set(re.findall(r"\]\((policies-[\w-]+\.png)\)", DOCS.read_text(encoding="utf-8")))
    assert shown == set(tables.FIGURES)
    assert all((DOCS.parent / name).is_file() for name in shown)


def test_tables_are_rewritten_between_their_markers(tables: ModuleType, folder: Path) -> None:
    assert tables.update(arguments(folder, check=True)) == 1
    assert "old" in (folder / "policies.md").read_text()
    assert tables.update(arguments(folder)) == 0
    text = (folder / "policies.md").read_text()
    assert text.startswith(
        "before\n<!-- table: ablation -->\nReplayed: Qwen3. Emulated: drafts, 0.5/0.7/0.8/0.9/0.97 acc"
    )
    assert "| without `sd`" in text
    assert text.endswith("|\n<!-- /table -->\nafter\n")
    assert tables.update(arguments(folder, check=True)) == 0


def test_runs_are_kept_and_go_on_after_a_stop(
    tables: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.update(arguments(folder))
    runs = folder / "runs.jsonl"
    kept = runs.read_text().splitlines()
    runs.write_text("\n".join(kept[:-2]) + "\n" + kept[-2][:40])  # two are lost, one of them cut off
    began: list[int] = []
    run_all = tables.run_all

    def note(jobs: list[Any], n_workers: int) -> Any:
        began.append(len(jobs))
        return run_all(jobs, n_workers)

    monkeypatch.setattr(tables, "run_all", note)
    assert tables.update(arguments(folder, check=True)) == 0
    assert began == [2]
    assert tables.update(arguments(folder, check=True)) == 0
    assert began == [2]


def test_another_trace_is_run_anew(tables: ModuleType, folder: Path) -> None:
    traces = tables.find_traces(folder)
    bench = tables.Bench(traces)
    tables.make_tables(bench, ["lossy"])
    before = tables.Cache(folder / "runs.jsonl", traces)
    write_csv(folder / "gemma.route.csv", seed=7)
    after = tables.Cache(folder / "runs.jsonl", traces)
    changed = {Path(job.replay.source).name for job in bench.wanted if before.key(job) != after.key(job)}
    assert changed == {"gemma.route.csv"}


def test_assumed_is_said_in_the_row(tables: ModuleType, folder: Path) -> None:
    (folder / "policies.md").write_text("<!-- table: prefetch -->\n<!-- /table -->\n")
    tables.update(arguments(folder, only="prefetch"))
    text = (folder / "policies.md").read_text()
    assert "Assumed:" in text.split("|")[0]
    said = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")}
    assert {"lru, next-layer, assumed 0.85", "lru, draft-gate, assumed 0.85", "lru, history"} <= said


def test_drafts_say_from_which_acceptance_they_pay(tables: ModuleType, folder: Path) -> None:
    (folder / "policies.md").write_text("<!-- table: drafts -->\n<!-- /table -->\n")
    tables.update(arguments(folder, only="drafts"))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (folder / "policies.md").read_text().splitlines()
        if line.startswith(("| Qwen3", "| Gemma"))
    ]
    assert len(rows) == 8
    for _, k, none, *speeds, pays in rows:
        assert k in ("4", "8")
        first = ACCEPTS.index(float(pays)) if pays != "no" else len(ACCEPTS)
        assert all(float(speed) <= float(none) for speed in speeds[:first])
        assert all(float(speed) >= float(none) for speed in speeds[first : first + 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": "nope"}, "--only"),
        ({"traces": Path("missing")}, "qwen.route.csv"),
        ({"only": "settings"}, "--docs"),
    ],
)
def test_bad_arguments(tables: ModuleType, folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tables.update(arguments(folder, **options))
