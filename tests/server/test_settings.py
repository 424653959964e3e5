"""The scheduler's settings as JSON: every field comes back as it was, and bad text is told in a sentence."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import run_pyspac
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.errors import ConfigError
from pyspac.scheduler.config import SchedulerConfig
from pyspac.server.arguments import attach_argv
from pyspac.server.child import Child
from pyspac.server.options import AttachOptions
from pyspac.server.settings import from_json, read_settings, to_json

# a value for each field that is not its default; a new field needs one here
SCHEDULER: dict[str, Any] = {
    "estimator": "spac",
    "n_levels": 7,
    "forgetting": 0.1 + 0.2,  # 0.30000000000000004: no digit may be lost
    "n_draft_max": 0,
    "ema_decay": 1 / 3,
    "static_steps": 3,
    "threshold": 5,
    "payback_steps": 0.0,
    "budget_share": 1e-2,
    "byte_budget": None,
    "link_gb_s": 12.5,
    "predict": ("token",),
    "without": frozenset({"evict", "sd"}),
    "baseline": "lru+fetch",
}
ATTACH: dict[str, Any] = {
    "scheduler": SchedulerConfig(
        **{k: v for k, v in SCHEDULER.items() if k != "baseline"}
    ),  # no predictors beside it
    "metrics_port": 0,
    "metrics_host": "::1",
    "cpu_share": 2 / 3,
    "speculation": "cascade",
    "warm_start": False,
    "model": Path("/models/a b 'c' \"d\"\n$HOME ä\udcff.gguf"),
    "log_json": True,
    "spec_type": "ngram",
}


@pytest.mark.parametrize(("kind", "values"), [(SchedulerConfig, SCHEDULER), (AttachOptions, ATTACH)])
def test_there_is_a_value_for_every_field(kind: Any, values: dict[str, Any]) -> None:
    assert values.keys() == {field.name for field in dataclasses.fields(kind)}
    assert [name for name, value in values.items() if value == getattr(kind(), name)] == []


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(AttachOptions)])
def test_every_field_comes_back(name: str) -> None:
    options = AttachOptions(**{name: ATTACH[name]})
    assert from_json(to_json(options)) == options


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SchedulerConfig)])
def test_every_field_of_the_scheduler_comes_back(name: str) -> None:
    options = AttachOptions(scheduler=SchedulerConfig(**{name: SCHEDULER[name]}))
    assert from_json(to_json(options)) == options


def test_all_come_back_together() -> None:
    assert from_json(to_json(AttachOptions(**ATTACH))) == AttachOptions(**ATTACH)
    assert from_json(to_json(AttachOptions())) == AttachOptions()


GOOD = json.loads(to_json(AttachOptions()))
BAD = {
    "": "not the JSON",
    "{": "not the JSON",
    "[]": "not the JSON",
    "null": "not the JSON",
    "5": "not the JSON",
    "{}": "lack 'scheduler'",
    json.dumps(GOOD | {"colour": "red"}): "colour",
    json.dumps(GOOD | {"scheduler": {"colour": "red"}}): "colour",
    json.dumps(GOOD | {"cpu_share": 2}): "--cpu-share cannot be 2",
    json.dumps(GOOD | {"scheduler": {"estimator": "arc"}}): "estimator cannot be 'arc'",
    json.dumps(GOOD | {"model": 5}): "not the JSON",
    json.dumps(GOOD | {"speculation": 5}): "--speculation cannot be 5",
    "[" * 100_000: "not the JSON",
}


@pytest.mark.parametrize(("text", "says"), BAD.items())
def test_bad_settings_are_told(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_json(text)
    result = CliRunner().invoke(app, ["attach", "b", "--settings", "-"], input=text)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = run_pyspac("attach", "b", "--settings", str(tmp_path / "none"), cache_dir=tmp_path)
    assert done.returncode == 2
    assert "cannot be read: No such file" in done.stderr


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_bytes(b"\xff\xfe{}")
    result = CliRunner().invoke(app, ["attach", "b", "--settings", str(file)])
    assert result.exit_code == 2
    assert "not UTF-8" in result.output


def test_stdin_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="closed"):
        read_settings("-")


def test_settings_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AttachOptions] = []
    monkeypatch.setattr("pyspac.server.board_file.find_board", lambda name: name)
    monkeypatch.setattr("pyspac.server.attach.run_attached", lambda _name, options: seen.append(options))
    monkeypatch.setattr("pyspac.server.log.set_up", lambda *_args, **_fields: None)
    file = tmp_path / "settings"
    file.write_text(to_json(AttachOptions(**ATTACH)))
    result = CliRunner().invoke(app, ["attach", "b", "--settings", str(file)])
    assert result.exit_code == 0, result.output
    assert seen == [AttachOptions(**ATTACH)]


def test_settings_are_no_command_line() -> None:
    assert attach_argv("b") == [sys.executable, "-m", "pyspac", "attach", "b", "--settings", "-"]


def test_a_child_reads_any_text(tmp_path: Path) -> None:
    """More than a pipe holds, to a child that waits before it reads."""
    text = "x" * 300_000
    copy = tmp_path / "copy"
    script = (
        "import pathlib, sys, time; time.sleep(0.2); pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"
    )
    child = Child("reader", [sys.executable, "-c", script, str(copy)], text=text)
    assert child.wait(20)
    assert child.exit_code() == 0
    assert copy.read_text() == text


def test_a_child_without_text_reads_nothing() -> None:
    child = Child("reader", [sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"])
    assert child.wait(20)
    assert child.exit_code() == 0
