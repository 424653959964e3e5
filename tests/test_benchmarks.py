"""The benchmark scripts run on a small model and print what benchmarks/README.md says."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import ROOT
from gguf import GGUFWriter

from pyspac.commands import machine
from pyspac.forward.loading import Loading
from pyspac.forward.options import ForwardOptions
from pyspac.model.checks import check_model_file

CONTENDERS = ["stock", "none", "all", "repacked"]


def run_script(*arguments: object) -> str:
    run = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    run_script(ROOT / "scripts/make_synthetic_gguf.py", path, "--layers", 1, "--experts", 8, "--vocab", 512)
    return path


def overhead_rows(model: Path, *arguments: object) -> list[dict[str, Any]]:
    short = ("--widths", "1,5", "--rounds", 2, "--steps", 1, "--threads", 1)
    output = run_script(ROOT / "benchmarks/bench_overhead.py", "--model", model, *short, "--json", *arguments)
    return [json.loads(line) for line in output.splitlines()]


def test_overhead_has_a_row_per_contender_and_width(model: Path) -> None:
    rows = overhead_rows(model)
    assert sorted((row["contender"], row["width"]) for row in rows) == sorted(
        (contender, width) for contender in CONTENDERS for width in (1, 5)
    )
    for row in rows:
        assert row["step_ms_p10"] <= row["step_ms_median"] <= row["step_ms_p90"]
        assert row["tps"] == pytest.approx(row["width"] * 1000 / row["step_ms_median"], rel=0.01)
        assert row["machine"]["cpu"]
        assert row["machine"]["llama_cpp_pin"] != "unknown"
        assert (row["ratio_median"] == 1) == (row["contender"] == "stock")


def test_overhead_measures_the_engines_memory(model: Path) -> None:
    pools = {row["contender"]: (row["pool_mib"], row["extra_mib"]) for row in overhead_rows(model)}
    assert pools["stock"] == (0.0, None)
    assert 0 < pools["none"][0] < pools["all"][0]
    assert pools["all"][1] < 100


def test_contender_can_be_left_out(model: Path) -> None:
    assert {row["contender"] for row in overhead_rows(model, "--no-repacked")} == {"stock", "none", "all"}


def test_defaults_have_a_row_per_model(model: Path, tmp_path: Path) -> None:
    """The defaults of `pyspac run` beside both layouts of llama.cpp; a model in the folder is not made."""
    (tmp_path / "q8_0.gguf").symlink_to(model)
    short = ("--rounds", 2, "--tokens", 8, "--threads", 1, "--folder", tmp_path)
    output = run_script(ROOT / "benchmarks/bench_defaults.py", *short, "--models", "demo,q8_0", "--json", "-")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["model"] for row in rows] == ["demo", "q8_0"]
    for row in rows:
        assert row["ratio"] == min(row["ratio_to_stock"], row["ratio_to_repacked"]) > 0
        assert row["ratio_quartiles"][0] <= row["ratio"] <= row["ratio_quartiles"][1]
        assert row["machine"]["cpu"]


@pytest.mark.model
def test_drafters_have_a_row_per_length_and_text() -> None:
    """A drafter whose file is absent is a line, and no error; `auto` says how near it is to the best."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/bench_drafters.py"), "--json", "-", "--threads", "1",
         "--sessions", "2", "--rounds", "1", "--requests", "1", "--predict", "16", "--prompt-tokens", "64",
         "--lengths", "3", "--drafters", "ngram,ngram-simple,draft-lora,head", "--mtp", "/nowhere/mtp.gguf"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "draft-lora is left out: there is no file /nowhere/mtp.gguf" in run.stderr
    assert "head is left out: give its file with --head FILE" in run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    divided = [kind for kind in ("new", "repeated") if kind in {row["text"] for row in rows}]
    assert divided
    kinds = ["code", "prose", "tables", "imports", "all", *divided]
    contenders = [("none", "0"), ("none", "again"), *product(("ngram", "ngram-simple"), ("3", "auto"))]
    assert [(row["drafter"], row["length"], row["text"]) for row in rows] == [
        (*contender, kind) for contender in contenders for kind in kinds
    ]
    for row in rows:
        assert row["tps"] > 0 < row["ratio"]
        assert 1 <= row["tokens_per_step"] <= 1 + 3 * (row["length"] == "3") + 8 * (row["length"] == "auto")
        assert (row["ratio"] == 1) or row["length"] != "0"
        assert row["n_sessions"] == 2
        assert len(row["acceptance_by_position"]) <= 8
        assert all(0 <= share <= 1 for share in row["acceptance_by_position"])
        assert bool(row["acceptance_by_position"]) == (row["drafted_per_step"] > 0)
        assert ("of_best" in row) == (row["length"] == "auto")
        assert row["machine"]["cpu"]


@pytest.mark.model
def test_controllers_are_compared_on_a_running_server(model: Path, tmp_path: Path) -> None:
    """On the demo's texts, and on a synthetic model whose drafts hold by chance."""
    rows = tmp_path / "rows.json"
    short = (*["--rounds", "1", "--requests", "1", "--predict", "32", "--threads", "1", "--json"], rows)
    for what in (("demo", "--streams", "lists"), ("synthetic", "--model", model, "--streams", "lists,mix")):
        controllers = ("off", "static-3", "forecast")
        output = run_script(ROOT / "benchmarks/bench_speculation.py", *what, *short, "--controllers",
                            ",".join(controllers))  # fmt: skip
        assert "forecast   worst slowdown" in output
        results = json.loads(rows.read_text())["results"]
        assert list(results) == ["lists"]
        assert tuple(results["lists"]) == controllers
        assert results["lists"]["off"]["n_drafted"] == 0
        row = results["lists"]["static-3"]
        assert row["tokens_per_step"] > 1.5
        assert len(row["acceptance_by_position"]) == 3


DEMO = ROOT / "pyspac/models/demo-moe.gguf"
WRONG = {
    "--head /nope": "there is no file /nope",
    f"--drafters head --head {DEMO}": "this model has no head",
    f"--head {__file__}": "not a GGUF file",
    "--temp -1": "give a number from 0 to 100",
    "--temp nan": "give a number from 0 to 100",
    "--threads 0": "give a whole number of 1 or more",
    "--rounds 0": "give a whole number of 1 or more",
    "--rounds -1": "give a whole number of 1 or more",
    "--sessions 0": "give a whole number of 1 or more",
    "--requests 0": "give a whole number of 1 or more",
    "--requests -1": "give a whole number of 1 or more",
    "--predict 0": "give a whole number of 2 or more",
    "--predict 1": "give a whole number of 2 or more",
    "--prompt-tokens 0": "give a whole number of 1 or more",
    "--model /nope": "/nope: there is no such file",
    "--drafters bogus": "--spec-type cannot be 'bogus'",
    "--drafters none": "nothing drafts",
    "--drafters draft-eagle3": "draft-eagle3 needs a draft model",
    "--drafters ,": "names none",
    "--lengths ,": "names none",
    "--lengths 2,x": "'x': give a whole number",
    "--lengths 999": "--draft-max cannot be 999",
    "--json /nope/x": "'/nope/x': give a file that can be written to",
    "--json /dev/full": "'/dev/full': give a file that can be written to",
    "--json=": "give a file that can be written to",
    "--clock cpu": "--clock cpu needs --threads 1",
}


@pytest.fixture
def bench_drafters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("bench_drafters")


@pytest.mark.model
@pytest.mark.parametrize("line", WRONG)
def test_drafters_refuses_what_is_wrong(
    line: str,
    bench_drafters: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a line, before anything is measured."""
    monkeypatch.setattr("sys.argv", ["bench_drafters.py", *line.split()])
    monkeypatch.setattr(bench_drafters, "Requests", None)
    try:
        code = bench_drafters.main()
    except SystemExit as exit:
        code = exit.code
    said = capsys.readouterr().err.splitlines()[-1]
    assert code == 2, said
    assert WRONG[line] in said


def test_no_two_rounds_of_drafters_have_the_same_order(
    bench_drafters: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do sessions repeat each other's."""
    orders = []

    def note_order(requests: Any) -> dict[str, Any]:
        orders.append(tuple(requests.rng.sample(range(20), 20)))
        requests.shares[bench_drafters.OFF].append(0.0)
        return {}

    way = nullcontext(SimpleNamespace())
    monkeypatch.setattr(bench_drafters, "open_way", lambda contender, args, interrupt: way)
    monkeypatch.setattr(bench_drafters.Requests, "round", note_order)
    args = SimpleNamespace(sessions=3, rounds=1, requests=1)
    bench_drafters.measure([bench_drafters.Contender("none", "0", ())], args)
    assert len(set(orders)) == len(orders) == 6


def test_drafters_can_be_interrupted(
    bench_drafters: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["bench_drafters.py"])
    monkeypatch.setattr(bench_drafters, "measure", interrupt)
    assert bench_drafters.main() == 130
    assert capsys.readouterr().err == "bench_drafters: interrupted\n"


def test_an_installed_package_names_no_commit_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may lie in somebody's repository; a clone has the file with the pin."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    monkeypatch.setattr("pyspac.commands.machine.REPOSITORY", tmp_path)
    assert (machine.commit(), machine.pin()) == ("unknown", "unknown")


def test_machine_names_what_it_ran_on() -> None:
    row = json.loads(run_script(ROOT / "benchmarks/machine.py"))
    assert row["n_cores"] >= 1
    assert row["memory_gib"] > 0
    assert len(row["llama_cpp_pin"]) == 9


def test_figures_are_drawn_from_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_script(ROOT / "benchmarks/figures.py", "--output", tmp_path)
    for name in ("speed.svg", "lossy.svg"):
        assert texts(tmp_path / name) == texts(ROOT / "docs" / name)


def texts(path: Path) -> list[str]:
    """What an SVG file says: titles, ticks, and the ratios beside the points."""
    return [
        element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


def tiers(model: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks/bench_tiers.py", "--model", model, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="a memory cgroup needs root")
def test_tiers_with_too_little_memory_is_a_sentence(model: Path) -> None:
    done = tiers(model, "--shares", 0.01)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "no room for the experts of one layer: give " in done.stderr
    done = tiers(model.with_name("none.gguf"))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def sparse_model(path: Path, name: str) -> Path:
    """A real model's geometry, header and size, without its data."""
    import make_synthetic_gguf as synthetic

    writer = GGUFWriter(path, "qwen3moe")
    synthetic._write_header(writer, name, geometry := synthetic.GEOMETRIES[name], 8192)
    tensors = list(synthetic.plan_tensors(geometry, 8192, seed=0))
    for tensor in tensors:
        synthetic._add_tensor_info(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + sum(tensor.n_bytes + 32 for tensor in tensors))
    return path


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("bench_lossy.py", "--rounds 0"),
        ("bench_balancer.py", "--tokens 16"),
        ("bench_balancer.py", "--sittings 1"),
        ("bench_balancer.py", "--json /nowhere/x"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_once(script: str, line: str) -> None:
    argv = [sys.executable, ROOT / "benchmarks" / script, *line.split()]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "cannot be" in done.stderr) == (2, True), done.stderr


def test_the_best_fixed_tau_owes_nothing_to_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways are alike but for noise: the balancer's loses nothing, yet seems to against the luckiest."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    balancer = importlib.import_module("bench_balancer")
    rng = np.random.default_rng(1)
    taus = ["auto", *balancer.fixed_taus("ema")]
    found = [
        balancer.compare([{tau: rng.lognormal(0, 0.1, 10).tolist() for tau in taus} for _ in range(4)])
        for _ in range(40)
    ]
    assert abs(np.mean([row["loss"] for row in found])) < 0.01
    assert np.mean([row["loss_at_most"] for row in found]) > 0.01
    assert np.mean([row["loss_95"][0] < 0 < row["loss_95"][1] for row in found]) > 0.8


@pytest.mark.parametrize("share", [0.25, 0.35, 0.5])
def test_run_takes_the_sizes_that_tiers_gives_it(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 17 GB, in a limit of which Python has taken its part."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tiers = importlib.import_module("bench_tiers")
    model = sparse_model(tmp_path / "m.gguf", "qwen3-30b-a3b")
    given: list[tuple[list[str], int]] = []

    def run(argv: list[str], limit: int, timeout_s: float) -> dict[str, Any]:
        given.append((argv, limit))
        return {"ttft_ms": 1.0, "token_ids": [1, 2], "prompt_read_bytes": 0, "tier": None, "n_prompt": 1,
                "tps": 1.0}  # fmt: skip

    monkeypatch.setattr(tiers, "run_limited", run)
    monkeypatch.setattr(tiers, "measure_in_order", lambda *_, **__: 1.0)
    monkeypatch.setattr(tiers, "measure_disk", lambda *_, **__: SimpleNamespace(depth_32_gb_s=1.0))
    args = SimpleNamespace(model=model, shares=str(share), rounds=1, predict=2, stock_predict=2, predictor=[],
                           threads=1, timeout=1.0)  # fmt: skip
    assert len(list(tiers.measure_all(args, check_model_file(model)))) == 1
    [(argv, limit)] = [(argv, limit) for argv, limit in given if "--ram" in argv]
    value = {flag: argv[argv.index(flag) + 1] for flag in ("--ram", "-c")}
    monkeypatch.setattr("pyspac.model.memory_tier.free_memory", lambda: limit - (190 << 20))
    options = ForwardOptions(model=model, device="none", ram=value["--ram"], n_ctx=int(value["-c"]))
    assert Loading.of(options).ram_bytes == pytest.approx(float(value["--ram"]) * 2**20, abs=1)


def test_what_tiers_wants_and_misses() -> None:
    """One row that has all, one that is slow, one that wastes the disk, one where all fits and is slower."""
    script = """
import json, sys
import bench_tiers
row = lambda share, phase, ratio, disk: {
    "predict": "none", "memory_share": share, "phase": phase, "ratio": ratio, "disk_share": disk}
rows = [row(0.25, "decode", 5.0, 0.85), row(0.25, "prompt", 1.9, 1.0), row(0.5, "decode", 9.0, 0.7),
        row(1.3, "decode", 0.97, 0.0), row(1.3, "prompt", 0.98, 0.0)]
print(json.dumps(bench_tiers.missed(rows)))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(run.stdout) == [
        "memory for 25%, prompt: 1.90 times mmap, wanted 2",
        "memory for 50%, decode: 70% of the disk, wanted 85%",
        "memory for 130%, decode: 0.97 times mmap, wanted 0.98",
    ]


def test_beside_has_a_row_per_width(model: Path) -> None:
    short = ("--widths", "1,5", "--rounds", 1, "--seconds", 0.05, "--busy", 1, "--threads", 2, "--json")
    output = run_script(ROOT / "benchmarks/bench_beside.py", "--model", model, *short)
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["width"] for row in rows] == [1, 5]
    assert all(0 < row["share_least"] <= row["share"] <= row["share_most"] for row in rows)


def test_loading_has_a_row_per_way(model: Path) -> None:
    output = run_script(ROOT / "benchmarks/bench_loading.py", model, "--rounds", 1, "--threads", 1, "--json")
    rows = [json.loads(line) for line in output.splitlines()]
    found = {(row["cache"], row["way"]) for row in rows}
    assert found == {*product(("cold", "warm"), ("engine", "loader", "stock")), ("cold", "disk")}
    assert all(0 < row["s_least"] <= row["s_median"] <= row["s_most"] for row in rows)
