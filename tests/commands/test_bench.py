"""`pyspac bench`: which ways it compares, what it says of them, and the defaults that it saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_models
import gguf_models
import input_models
import mask_adapters
import pytest
import typer
from typer.testing import CliRunner, Result

from pyspac.cli import app
from pyspac.commands import saved_defaults
from pyspac.commands.bench_report import AUTO_SPLIT, Findings
from pyspac.commands.bench_ways import PROMPTS, Given, Way, find_ways, fit_together, n_cpu_moe
from pyspac.engine.devices import gpu_devices
from pyspac.errors import UsageError
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import LayerGeometry, MoeGeometry, read_geometry
from pyspac.server.options import ServeOptions
from pyspac.server.plan import Plan, plan_launch
from pyspac.talk.turns import Turns

SHORT = ("-n", "4", "--rounds", "2", "-t", "1")
WITHOUT_FLAGS = "split" if gpu_devices() else "host"  # the mode


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    input_models.write_target(folder / "target.gguf")
    input_models.write_draft(folder / "draft.gguf")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPAC_CACHE_DIR", str(tmp_path / "cache"))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


# ---- what is measured, and said ------------------------------------------------------------------


def timings(n_prompt: int, prompt_s: float, n_tokens: int, s: float) -> dict[str, float]:
    """As a server tells them."""
    return {
        "prompt_n": n_prompt,
        "prompt_ms": 1e3 * prompt_s,
        "predicted_n": n_tokens,
        "predicted_ms": 1e3 * s,
    }


def test_speeds_by_hand() -> None:
    """Two rounds of two prompts: 11 tokens take 10 steps; tokens and seconds are added up."""
    turns = Turns()
    turns.add("a", 0, "x", timings(30, 1.0, 11, 1.0))
    turns.add("a", 0, "y", timings(10, 1.0, 11, 4.0))
    turns.add("a", 1, "x", timings(30, 2.0, 11, 2.0))
    turns.add("a", 1, "y", timings(10, 2.0, 0, 0.0))  # the end token at once: only a prompt
    assert turns.generation("x").tps["a"] == [10.0, 5.0]
    assert turns.generation().tps["a"] == [4.0, 5.0]
    assert turns.prompts().tps["a"] == [20.0, 10.0]


GIVEN = Given(model=Path("m.gguf"), split=AUTO_SPLIT)


def findings(speeds: dict[str, list[float]]) -> Findings:
    """Of ways with these speeds in each round; "own" is pyspac's."""
    turns = Turns()
    for name, rounds in speeds.items():
        for i, speed in enumerate(rounds):
            for prompt in PROMPTS:
                turns.add(name, i, prompt, timings(10, 1.0, 11, 10.0 / speed))
    options = ServeOptions(model=Path("m.gguf"), stock=True)
    ways = {name: Way(f"--{name}", options, name.startswith("own")) for name in speeds}
    return Findings(GIVEN, ways, turns, True, {"cpu": "a CPU"})


@pytest.mark.parametrize(
    ("own", "said", "winner"),
    [
        ([20.0, 21.0, 22.0], "pyspac wins: 'own' generates 2.10 times (2.00 to 2.20 over the", "own"),
        ([5.0, 5.0, 5.0], "pyspac loses here: its best way, 'own', generates 0.50 times", "stock"),
        ([9.0, 10.0, 11.0], "Neither wins: 'own' generates 1.00 times (0.90 to 1.10 over", "own"),
        ([9.0, 9.0, 11.0], "now slower. 'stock' has the better median", "stock"),
    ],
)
def test_verdict(own: list[float], said: str, winner: str) -> None:
    found = findings({"stock": [10.0, 10.0, 10.0], "repacked": [9.0, 9.0, 9.0], "own": own})
    assert said in found.verdict()
    assert found.winner == winner
    assert f"Use: pyspac run -m m.gguf --{winner}" in found.verdict()


OFTEN = [10.0, 11.0, 10.0, 11.0, 10.0]  # tokens/s of five rounds


def scaled(ratio: float) -> list[float]:
    return [ratio * speed for speed in OFTEN]


@pytest.mark.parametrize(
    ("speeds", "why"),
    [
        ({"stock": scaled(1.1), "own": OFTEN}, None),
        ({"stock": OFTEN, "own": OFTEN, "own ngram": scaled(1.1)}, None),
        ({"stock": [12.0], "own": [10.0]}, "1 rounds say too little, 5 are needed"),
        ({"stock": [12.0] * 4, "own": [10.0] * 4}, "4 rounds say too little, 5 are needed"),
        # the report's: neither wins, and stock has the better median
        ({"stock": [9.0, 12.0, 12.0, 12.0, 12.0], "own": [10.0] * 5}, "'stock' is 1.20 times (0.90 to 1.20 "),
        (
            {"stock": [10.0] * 5, "own": [9.0] * 5, "stock ngram": [4.8, 12.3, 12.0, 12.0, 12.0]},
            "'stock ngram' is 1.33 times (0.53 to 1.37 over the rounds) as fast as 'own', not",
        ),
        # better than llama.cpp, but not than what runs without flags
        (
            {"stock": [5.0] * 5, "own": [10.0] * 5, "own ngram": [9.0, 12.0, 12.0, 12.0, 12.0]},
            "'own ngram' is 1.20 times (0.90 to 1.20 over the rounds) as fast as 'own', not faster",
        ),
        ({"stock": [5.0] * 5, "own": [10.0] * 5}, "'own' is what pyspac run does by itself"),
    ],
)
def test_only_what_wins_every_round_is_saved(speeds: dict[str, list[float]], why: str | None) -> None:
    found = findings(speeds)
    said = found.why_not_saved()
    assert said == why if why is None else why in str(said)


def test_a_way_with_flags_that_were_given_is_saved_if_it_wins() -> None:
    found = findings({"stock": [5.0] * 5, "own": [10.0] * 5})
    assert "does by itself" in str(found.why_not_saved())
    for given in (replace(GIVEN, split="--device emulated --cache 50%"), replace(GIVEN, ram="--ram 4")):
        assert replace(found, given=given).why_not_saved() is None


def test_flags_can_be_typed_as_they_are_printed() -> None:
    given = replace(GIVEN, model=Path("my models/m.gguf"))
    found = replace(findings({"stock": [10.0, 10.0], "own": [20.0, 20.0]}), given=given)
    assert "Use: pyspac run -m 'my models/m.gguf' --own" in found.verdict()


def test_a_way_that_was_disturbed_does_not_choose_the_rival() -> None:
    """The first way is slow in two of three rounds; beside it 'b' looks the faster, yet 'a' comes closer."""
    found = findings(
        {"first": [10.0, 1.0, 1.0], "a": [9.0, 9.0, 9.0], "b": [30.0, 8.0, 8.0], "own": [36.0, 8.1, 8.1]}
    )
    own, other, ratio = found.rivals(found.turns.generation())
    assert (own, other) == ("own", "a")
    assert ratio.median == pytest.approx(0.9)
    assert found.winner == "a"


def test_prompts_have_rivals_of_their_own() -> None:
    turns = Turns()
    for name, prompt_s, s in (("stock", 1.0, 2.0), ("repacked", 2.0, 1.0), ("own", 1.5, 0.5)):
        for i in range(2):
            for prompt in PROMPTS:
                turns.add(name, i, prompt, timings(30, prompt_s, 11, s))
    ways = {name: Way("", ServeOptions(model=Path("m.gguf")), name == "own") for name in turns._rounds}
    found = Findings(GIVEN, ways, turns, True, {})
    assert "'own' generates 2.00 times" in found.verdict()
    assert "as fast as 'repacked'" in found.verdict()
    assert "'own' takes them 0.67 times" in found.prompt_verdict()
    assert "as fast as 'stock'" in found.prompt_verdict()


def test_n_cpu_moe_by_hand() -> None:
    """Three layers with 4 experts of 10 bytes each: 40 bytes hold the last one, 0 none, 120 all."""
    layers = tuple(
        LayerGeometry(il=il, n_expert=4, expert_bytes=10, quantisation=(), shared_bytes=0) for il in (1, 2, 3)
    )
    assert [n_cpu_moe(layers, n_bytes) for n_bytes in (0, 39, 40, 80, 119, 120)] == [4, 4, 3, 2, 2, 0]


def planned(model: Path, given: Given) -> tuple[Plan, MoeGeometry]:
    """Of what was given, as `bench` plans it."""
    options = replace(
        given.way(given.split, given.ram, is_own=True).options, socket=Path("x.sock"), board="x"
    )
    return plan_launch(options, is_stopped=lambda: False), read_geometry(check_model_file(model))


def test_ways_that_do_not_fit_run_one_by_one(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(model=models / "target.gguf", split="--device none")
    plan, geometry = planned(given.model, given)
    ways = {"a": given.way(is_own=True), "b": given.way("-md", str(models / "draft.gguf"), is_own=False)}
    asked: list[int] = []
    monkeypatch.setattr("pyspac.commands.bench_ways.fits_memory", lambda n: asked.append(n) or False)
    assert not fit_together(ways, plan, geometry)
    assert asked == [2 * geometry.model_bytes + (models / "draft.gguf").stat().st_size]
    monkeypatch.setattr("pyspac.commands.bench.fit_together", lambda *_: False)
    result = invoke("bench", "-m", models / "target.gguf", *SHORT)
    assert result.exit_code == 0, result.output
    assert "ran one after the other" in result.output


def test_flags_of_llama_server_are_every_ways(models: Path) -> None:
    given = Given(model=models / "target.gguf", common="-c 512 -t 1 --top-k 1", split="--device none")
    for way in find_ways(given, *planned(given.model, given)).values():
        assert way.options.n_ctx == 512
        passed = [text for text in way.options.passed if text != "--no-repack"]
        assert passed[-4:] == ["-t", "1", "--top-k", "1"]


# ---- the command ---------------------------------------------------------------------------------


def test_bench(models: Path, tmp_path: Path) -> None:
    """A row that can be shared: no folder in it; a figure; and a table."""
    pytest.importorskip("matplotlib")
    row_file, figure = tmp_path / "row.json", tmp_path / "bench.png"
    result = invoke(
        *("bench", "-m", models / "target.gguf", "-md", models / "draft.gguf", "--device", "emulated"),
        *("--cache", "50%", "--json", row_file, "--png", figure, *SHORT),
    )
    assert result.exit_code == 0, result.output
    row: dict[str, Any] = json.loads(row_file.read_text())
    assert list(row["ways"]) == [
        *("llama.cpp", "llama.cpp, weights as in the file", "pyspac, split", "pyspac, no device"),
        *("llama.cpp, draft", "pyspac, split, draft"),
    ]
    for name, way in row["ways"].items():
        acceptance = way.pop("acceptance")
        assert acceptance is None or (name.endswith(", draft") and 0 <= acceptance <= 1)
        for spread in way.values():
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    assert row["winner"] in row["ways"]
    assert row["machine"]["cpu"]
    assert str(models) not in row_file.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.png", "row.json"]
    assert "Use: pyspac run -m" in result.output


def test_an_adapter_and_experts_on_disk(models: Path, tmp_path: Path) -> None:
    """A way more, and every own way within the memory."""
    model = models / "target.gguf"
    adapter = mask_adapters.write_adapter(tmp_path / "mtp.gguf", model)
    row_file = tmp_path / "row.json"
    result = invoke("bench", "-m", model, "--mtp", adapter, "--ram", "auto", "--json", row_file, *SHORT)
    assert result.exit_code == 0, result.output
    row: dict[str, Any] = json.loads(row_file.read_text())
    assert list(row["ways"])[-2:] == ["pyspac, ngram", "pyspac, draft-lora"]
    assert (row["mtp"], row["ram"]) == ("mtp.gguf", "auto")
    given = Given(model=model, ram="--ram 4", mtp=adapter)
    ways = find_ways(given, *planned(model, given))
    assert {name for name, way in ways.items() if way.options.ram == "4"} == {
        "pyspac", "pyspac, ngram", "pyspac, draft-lora",
    }  # fmt: skip
    assert {name for name, way in ways.items() if way.options.mtp} == {"pyspac, draft-lora"}
    assert ways["pyspac, draft-lora"].flags == f"--device none --ram 4 --mtp {adapter}"


def test_a_head_beside_an_adapter(tmp_path: Path) -> None:
    """Ways by what drafts; the flags of each are those that `pyspac run` takes."""
    model = gguf_models.write_model(tmp_path / "t.gguf", "qwen3moe")
    head = eagle_models.write_eagle3(tmp_path / "head.gguf", "qwen3moe")
    adapter = mask_adapters.write_adapter(tmp_path / "mtp.gguf", model)
    row_file = tmp_path / "row.json"
    result = invoke("bench", "-m", model, "-md", head, "--mtp", adapter, "--json", row_file, *SHORT)
    assert result.exit_code == 0, result.output
    row: dict[str, Any] = json.loads(row_file.read_text())
    assert list(row["ways"])[-3:] == ["llama.cpp, draft-eagle3", "pyspac, draft-eagle3", "pyspac, draft-lora"]
    assert (row["draft"], row["mtp"]) == ("head.gguf", "mtp.gguf")
    given = Given(model=model, drafting=f"-md {head} --spec-type draft-eagle3", mtp=adapter)
    ways = find_ways(given, *planned(model, given))
    assert ways["pyspac, draft-eagle3"].flags == f"--device none -md {head} --spec-type draft-eagle3"
    result = invoke("bench", "-m", model, "-md", head, "--mtp", model, *SHORT)  # no adapter
    assert result.exit_code == 2, result.output


def test_ctrl_c_leaves_nothing_behind(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the rounds."""
    turns = iter(range(7))

    @contextmanager
    def progress_bar(n_turns: int) -> Iterator[Callable[[], None]]:
        def on_turn() -> None:
            if next(turns) == 6:
                raise KeyboardInterrupt

        yield on_turn

    monkeypatch.setattr("pyspac.commands.bench._progress_bar", progress_bar)
    files = ("--json", tmp_path / "row.json", "--png", tmp_path / "bench.png", "--profile", "--rounds", "5")
    assert invoke("bench", "-m", models / "target.gguf", "-n", "4", *files).exit_code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "1"], "--rounds"),
        (["-n", "1"], "-n"),
        (["-n", "9" * 20], "-n cannot be 9999"),
        (["--png", "/nowhere/a.png"], "--png"),
        (["--json", "/nowhere/a.json"], "--json"),
        (["--cache", "50%"], "--cache 50% needs a device"),
        (["-md", "/nowhere.gguf"], "there is no such file"),
        (["-m", "/nowhere.gguf"], "there is no such file"),
    ],
)
def test_bad_input(models: Path, arguments: list[str], said: str) -> None:
    result = invoke("bench", "-m", models / "target.gguf", *SHORT, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_a_model_is_needed() -> None:
    assert invoke("bench").exit_code == 2


# ---- saved defaults ------------------------------------------------------------------------------


def run_with(models: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """The object of `pyspac run --json`, and what it said."""
    result = invoke(
        *("run", "-m", models / "target.gguf", "-p", "x", "-n", "2", "-t", "1", "--json", "-"), *arguments
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def row_slots(models: Path, *flags: str) -> int:
    return int(run_with(models, *flags)[0]["experts"]["n_slots"])


def bench_finds(monkeypatch: pytest.MonkeyPatch, model: Path, own: list[float], stock: list[float]) -> Result:
    """`pyspac bench --profile` where the ways had these speeds."""
    found = findings({"stock": stock, "own": own})
    measured = replace(found, given=replace(GIVEN, model=model))
    monkeypatch.setattr("pyspac.commands.bench.measure", lambda *_: measured)
    return invoke("bench", "-m", model, "--profile")


def test_saved_defaults_are_used_named_and_forgotten(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = models / "target.gguf"
    result = bench_finds(monkeypatch, target, own=[10.0] * 5, stock=[11.0] * 5)
    assert result.exit_code == 0, result.output
    assert "saved as this model's defaults: --stock (" in result.output
    [file] = (tmp_path / "cache/defaults").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    row, said = run_with(models)
    assert row["mode"] == "stock"
    assert said.count("using the defaults that `pyspac bench --profile` saved for this model: --stock") == 1
    assert "--stock (saved by pyspac bench --profile)" in " ".join(said.split())  # the closing table
    doctor = "".join(invoke("doctor", target, "-t", "1").output.split())  # lines cut long paths
    assert f"{target}:runandchattake--stock,aspyspacbench--profilesavedit" in doctor
    assert f"elsepyspacbench--forget-m{target}" in doctor
    forgotten = invoke("bench", "--forget", "-m", target)
    assert (forgotten.exit_code, forgotten.output) == (0, f"forgot this model's defaults: --stock ({file})\n")
    assert not file.exists()
    row, said = run_with(models)
    assert row["mode"] == WITHOUT_FLAGS
    assert "saved" not in said
    assert invoke("bench", "--forget", "-m", target).output.startswith("no defaults are saved for this model")


def test_what_does_not_win_is_not_saved(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither wins: `run` and `chat` stay as they are."""
    target = models / "target.gguf"
    result = bench_finds(monkeypatch, target, own=[10.0] * 5, stock=[9.0, 12.0, 12.0, 12.0, 12.0])
    assert result.exit_code == 0, result.output
    assert (
        "nothing was saved: 'stock' is 1.20 times (0.90 to 1.20 over the rounds) as fast as" in result.output
    )
    assert not (tmp_path / "cache/defaults").exists()
    saved_defaults.save(target, "--stock")
    result = bench_finds(monkeypatch, target, own=[10.0] * 5, stock=[9.0] * 5)
    assert "what was saved before stays: --stock (pyspac bench --forget)" in result.output


def test_too_few_rounds_save_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspac.commands.bench.measure", lambda *_: pytest.fail("measured"))
    result = invoke("bench", "-m", models / "target.gguf", "--profile", *SHORT)
    assert result.exit_code == 2
    assert "--rounds cannot be 2: give 5 or more with --profile" in result.output


def test_a_file_that_cannot_be_read_is_forgotten(models: Path) -> None:
    path = saved_defaults.save(models / "target.gguf", "--stock")
    path.write_text("[]")
    assert (
        "forgot this model's defaults: unreadable"
        in invoke("bench", "--forget", "-m", models / "target.gguf").output
    )
    assert not path.exists()


def test_flags_replace_saved_defaults(models: Path) -> None:
    """Any flag of how to run, also one that repeats the default; --stock is plain llama.cpp."""
    target = models / "target.gguf"
    saved_defaults.save(target, "--device emulated --cache 50% --spec-type ngram")
    row, said = run_with(models)
    assert row["experts"]["n_slots"] == row_slots(models, "--device", "emulated", "--cache", "50%")
    assert (row["mode"], row["emulated"], row["spec_type"]) == ("split", True, "ngram")
    assert "saved for this model: --device emulated" in said
    for flags, mode in (
        (["--stock"], "stock"),
        (["--device", "auto"], WITHOUT_FLAGS),
        (["--spec-type", "none"], WITHOUT_FLAGS),
    ):
        row, said = run_with(models, *flags)
        assert (row["mode"], row["emulated"], row["spec_type"]) == (mode, False, "none")
        assert "saved" not in said


# of run and chat: what is generated, where it goes, and how much of the machine it may have
WHAT = {
    *("model_word", "model", "hf_repo", "server", "prompt", "file", "chat", "system_prompt", "n_predict"),
    *("ctx_size", "cpu_range", "json_file", "lossy", "max_kl", "verbose"),
}


@pytest.mark.parametrize("name", ["run", "chat"])
def test_every_flag_replaces_saved_defaults_or_goes_beside_them(name: str) -> None:
    """A new one has to be in one of the two sets."""
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    flags = {parameter.name for parameter in command.params} - {"help"}
    assert flags <= {*saved_defaults.HOW, *WHAT}
    assert not {*saved_defaults.HOW} & WHAT


def test_saved_defaults_belong_to_one_model(models: Path) -> None:
    saved_defaults.save(models / "draft.gguf", "--stock")
    row, said = run_with(models)
    assert row["mode"] == WITHOUT_FLAGS
    assert "saved" not in said


def test_saved_adapter_that_is_gone(models: Path, tmp_path: Path) -> None:
    adapter = mask_adapters.write_adapter(tmp_path / "mtp.gguf", models / "target.gguf")
    saved_defaults.save(models / "target.gguf", f"--mtp {adapter}")
    assert run_with(models)[0]["mtp"] == str(adapter)
    adapter.unlink()
    assert f"want the adapter {adapter}, which is gone" in run_with(models)[1]


def test_saved_draft_model_that_is_gone(models: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes((models / "draft.gguf").read_bytes())
    saved_defaults.save(models / "target.gguf", f"-md {draft}")
    assert run_with(models)[0]["draft"] == str(draft)
    draft.unlink()
    row, said = run_with(models)
    assert row["draft"] is None
    assert "which is gone" in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--stock --help", "--help"), ("--stock --help-all", "--help-all"), ("-p evil", "-p"),
        ("--stock --json FILE", "--json"), ("--stock --temp 9", "--temp 9"),
        ("-- --log-file x", "--log-file"),
    ],
)  # fmt: skip
def test_saved_flags_that_bench_never_saves(models: Path, flags: str, named: str) -> None:
    """They were edited by hand: none of them is used, and one line says why."""
    saved_defaults.save(models / "target.gguf", flags)
    row, said = run_with(models)
    assert row["mode"] == WITHOUT_FLAGS
    assert f"saved for this model cannot be used ({named}" in said
    assert said.count("saved for this model") == 1


@pytest.mark.parametrize("text", ["", "[]", '{"stock": true}', "\x00", "[" * 100_000], ids=lambda t: t[:9])
def test_damaged_defaults_are_none(models: Path, text: str) -> None:
    """Every command that reads them goes on, and says so."""
    target = models / "target.gguf"
    path = saved_defaults.save(target, "--stock")
    path.write_text(text)
    row, said = run_with(models)
    assert row["mode"] == WITHOUT_FLAGS
    assert f"cannot be used ({path} cannot be read)" in said
    doctor = " ".join(invoke("doctor", target, "-t", "1").output.split())
    assert "cannot be read, so it is not used" in doctor
    assert invoke("bench", "--forget", "-m", target).output.startswith("forgot this model's defaults: unread")


def test_defaults_of_a_model_that_is_gone_are_forgotten(models: Path, tmp_path: Path) -> None:
    """By the name that doctor shows."""
    moved = tmp_path / "moved.gguf"
    moved.write_bytes((models / "target.gguf").read_bytes())
    path = saved_defaults.save(moved, "--stock")
    moved.unlink()
    assert (
        invoke("bench", "--forget", "-m", moved).output == f"forgot this model's defaults: --stock ({path})\n"
    )
    assert not path.exists()
    again = invoke("bench", "--forget", "-m", moved)
    assert (again.exit_code, "there is no such file" in again.output) == (2, True)


@pytest.mark.parametrize("field", [{"flags": None}, {"flags": ["--stock"]}, {"model": 5}])
def test_a_damaged_field_is_no_default(models: Path, field: dict[str, object]) -> None:
    path = saved_defaults.save(models / "target.gguf", "--stock")
    path.write_text(json.dumps(json.loads(path.read_text()) | field))
    row, said = run_with(models)
    assert row["mode"] == WITHOUT_FLAGS
    assert "cannot be read" in said


@pytest.mark.parametrize(
    "flags",
    ["--cache lots --device emulated", "--spec-type magic", "--ram", "-m other.gguf 'open", "--port 1"],
)
def test_flags_that_are_none_are_not_used(models: Path, flags: str) -> None:
    saved_defaults.save(models / "target.gguf", flags)
    row, said = run_with(models)
    assert row["mode"] == WITHOUT_FLAGS
    assert "using the defaults" not in said
    assert "the defaults saved for this model cannot be used (" in said


@pytest.mark.parametrize("flags", ["--device CUDA7", "-md {draft}", "--stock --no-such-flag"])
def test_defaults_that_work_no_longer_are_not_used(flags: str, models: Path, tmp_path: Path) -> None:
    """A GPU that was taken out, a draft model that was overwritten, a flag that llama-server had."""
    (tmp_path / "draft.gguf").write_bytes(b"garbage")
    saved_defaults.save(models / "target.gguf", flags.format(draft=tmp_path / "draft.gguf"))
    row, said = run_with(models)
    assert (row["mode"], row["draft"]) == (WITHOUT_FLAGS, None)
    assert "cannot be used" in said
    assert "not used; `pyspac bench --profile` saves new ones" in said
    assert "using the defaults" not in said


def test_saved_files_are_found_from_anywhere(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that was given by a relative path."""
    given: list[Given] = []

    def measure(what: Given, *_: object) -> Findings:
        given.append(what)
        raise UsageError("enough")

    monkeypatch.setattr("pyspac.commands.bench.measure", measure)
    monkeypatch.chdir(models)
    assert invoke("bench", "-m", "target.gguf", "-md", "draft.gguf", "--mtp", "mtp.gguf").exit_code == 2
    assert f"-md {models / 'draft.gguf'}" in given[0].drafting
    assert given[0].mtp == models / "mtp.gguf"


def test_nothing_is_measured_where_nothing_can_be_saved(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPAC_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("pyspac.commands.bench.measure", lambda *arguments: pytest.fail("measured"))
    result = invoke("bench", "-m", models / "target.gguf", "--profile")
    assert result.exit_code == 1
    assert "the defaults cannot be saved" in result.output


def test_folder_that_cannot_be_written(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYSPAC_CACHE_DIR", str(tmp_path / "file"))
    result = invoke("bench", "-m", models / "target.gguf", "--profile")
    assert result.exit_code == 1
    assert "the defaults cannot be saved" in result.output
    assert "PYSPAC_CACHE_DIR" in result.output
