"""`pyspac bench --report`: what it writes passes the check of what others send; what is wrong does not."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands import machine
from pyspac.commands.bench_report import AUTO_SPLIT, Findings
from pyspac.commands.bench_ways import PROMPTS, Given, Way
from pyspac.commands.community import markdown, report, write_report
from pyspac.server.options import ServeOptions
from pyspac.talk.turns import Turns

MODEL = ROOT / "pyspac/models/demo-moe.gguf"
_SPEC = importlib.util.spec_from_file_location("community_check", ROOT / "benchmarks/community/check.py")
assert _SPEC is not None
assert _SPEC.loader is not None
check = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check)

OWN_FLAGS = "--device none -md '/home/some one/models/draft.gguf' --rpc 10.0.0.5:50052,10.0.0.6:50052"


def findings() -> Findings:
    turns = Turns()
    for name, speeds in {"llama.cpp": [10.0, 11.0, 12.0], "pyspac": [20.0, 22.0, 21.0]}.items():
        for i, speed in enumerate(speeds):
            for prompt in PROMPTS:
                timings = {"prompt_n": 10, "prompt_ms": 1e3, "predicted_n": 11, "predicted_ms": 1e4 / speed}
                turns.add(name, i, prompt, timings)
    options = ServeOptions(model=MODEL, stock=True)
    ways = {
        "llama.cpp": Way("--stock", options, is_own=False),
        "pyspac": Way(OWN_FLAGS, options, is_own=True),
    }
    return Findings(Given(model=MODEL, split=AUTO_SPLIT), ways, turns, True, machine.describe())


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(json.loads(json.dumps(report(findings()))))


def test_what_is_written_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_report(path, findings())
    assert check.main([str(path)]) == 0
    text = path.read_text() + (tmp_path / "mine.md").read_text()
    for private in ("some one", "10.0.0", str(ROOT), "/home"):
        assert private not in text
    assert "draft.gguf" in text


def test_table(found: dict[str, Any]) -> None:
    """Medians by hand: 11 and 21 tokens/s; rounds 2, 2 and 1.75 times as fast."""
    text = markdown(found)
    assert (
        "| pyspac | `--device none -md draft.gguf --rpc HOST:PORT` | 21 (20.5 to 21.5) | 10 (10 to 10) |"
        in text
    )
    assert "`pyspac` generates 2.00 times as fast as `llama.cpp` (1.75 to 2.00 over 3 rounds)." in text
    assert "demo-moe.gguf" in text
    value = copy.deepcopy(found)
    value["rows"][0]["generation_tps"].update(median=2259.4, low=99.46, high=12345.6)
    assert "| 2,259 (99.5 to 12,346) |" in markdown(value)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lacks machine": lambda x: x.pop("machine"),
    "has 'host'": lambda x: x["machine"].update(host="mine"),
    "out of bounds": lambda x: x["rows"][0]["generation_tps"].update(least=-1.0),
    "out of order": lambda x: x["rows"][0]["generation_tps"].update(median=99.0),
    "wanted is number": lambda x: x["ratio"].update(median="2"),
    "has no row": lambda x: x.update(winner="magic"),
    "equally often": lambda x: x["rows"][0].update(n_rounds=2),
    "one of pyspac": lambda x: x["rows"][0].update(is_pyspac=True),
    "holds a path": lambda x: x["rows"][0].update(flags="-md /home/me/x.gguf"),
    "not of the form": lambda x: x["model"].update(hash="abc"),
    "wanted is 1": lambda x: x.update(format=2),
    "has 1 entries": lambda x: x["rows"].pop(),
    "wanted is integer": lambda x: x["model"].update(n_layer=True),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_wrong_is_refused(found: dict[str, Any], why: str) -> None:
    value = copy.deepcopy(found)
    WRONG[why](value)
    assert any(why in text for text in check.problems(value)), check.problems(value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100000, '{"format": NaN}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert check.main([str(path), str(tmp_path / "missing.json")]) == 1


@pytest.mark.parametrize("name", ["x.txt", "missing/x.json"])
def test_a_report_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    """Before anything is measured."""
    done = CliRunner().invoke(app, ["bench", "-m", str(MODEL), "--report", str(tmp_path / name)])
    assert done.exit_code == 2
    assert "--report" in done.output
