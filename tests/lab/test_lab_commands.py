"""`pyspac lab` and `pyspac trace` from the command line: what they write, and how they refuse bad input."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_trace
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.errors import ConfigError
from pyspac.forward.model import Model, ModelParams
from pyspac.lab.combos import COMBINATIONS, DEFAULT_SWEEP
from pyspac.lab.machine import PRESETS
from pyspac.lab.policy import DIMENSIONS
from pyspac.lab.registry import names
from pyspac.lab.trace import TokenStatus, Trace
from pyspac.lab.trace_file import read_trace, write_trace

ROOT = Path(__file__).resolve().parents[2]
DEMO_TRACE = ROOT / "tests" / "data" / "demo-trace.parquet"
EXAMPLE = ROOT / "examples" / "lab" / "fading_count.py"
KEYS = {
    "accesses", "hits", "misses", "late_loads", "collision_misses", "loads", "evictions", "bytes_moved",
    "coverage", "expert_coverage", "coverage_per_gb", "activations", "covered_activations", "fidelity",
    "predicted_stall_ms", "predicted_tpot_ms",
    "predicted_ttft_ms", "predicted_tps", "oracle_tps", "oracle_share",
}  # fmt: skip


def call(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def call_json(*args: object) -> Any:
    result = call(*args, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    tokens = [[[int(e) for e in rng.choice(8, 2, replace=False)] for _ in range(4)] for _ in range(12)]
    path = tmp_path_factory.mktemp("trace") / "tiny.parquet"
    write_trace(make_trace(tokens, status=np.array([0, 0] + [1] * 10, np.uint8)), path)
    return path


def test_run_writes_one_object(trace_file: Path) -> None:
    row = call_json("lab", "run", trace_file, "--eviction", "lru", "--capacity", "25%", "--k", "0")
    assert row.keys() >= KEYS
    assert row["hits"] + row["misses"] == row["accesses"] == 10 * 4 * 2
    assert (row["eviction"], row["prefetch"], row["miss"], row["routing"]) == (
        "lru",
        "none",
        "fetch",
        "standard",
    )
    assert row["machine_model"]["name"] == "rtx4090"


def test_estimators_bring_prefetch_and_host_misses(trace_file: Path) -> None:
    row = call_json("lab", "run", trace_file, "--eviction", "ema", "--capacity", "25%")
    assert (row["prefetch"], row["miss"]) == ("utility", "host")


def test_first_adds_the_coverage_of_the_first_tokens(trace_file: Path) -> None:
    args = ("lab", "run", trace_file, "--capacity", "50%", "--k", "0", "--no-oracle")
    assert call_json(*args)["coverage_first"] is None
    rows = [call_json(*args, "--first", n) for n in (3, 10, 99)]
    assert rows[0]["coverage_first"] != rows[0]["coverage"]
    assert rows[1]["coverage_first"] == rows[2]["coverage_first"] == rows[0]["coverage"]
    assert "coverage_first" in call(*args, "--first", 3).stdout
    with_prompt = call_json(*args, "--first", 10, "--phase", "all")
    assert with_prompt["coverage_first"] > with_prompt["coverage"]  # the prompt found nothing


def test_slots_of_a_layers_own(trace_file: Path) -> None:
    row = call_json(
        "lab", "run", trace_file, "--eviction", "lru", "--capacity", "25%", "--per-layer", "--no-oracle"
    )
    assert row["setup"]["per_layer"]


def test_what_is_said_beside_a_policy_counts(trace_file: Path) -> None:
    args = ("lab", "run", trace_file, "--policy", "sp-moe", "--k", "2", "--capacity", "50%", "--no-oracle")
    assert call_json(*args)["prefetch"] == "draft-gate"
    row = call_json(*args, "--prefetch", "draft-gate:cutoff=1,critical=1", "--miss", "host")
    assert row["setup"]["prefetch"] == "draft-gate:cutoff=1,critical=1"
    assert row["miss"] == "host"


def test_cold_keeps_the_prompt_from_the_scheduler(trace_file: Path) -> None:
    args = ("lab", "run", trace_file, "--capacity", "50%", "--k", "0", "--no-oracle", "--first", 1)
    seeded, cold = call_json(*args), call_json(*args, "--cold")
    assert seeded["coverage_first"] > cold["coverage_first"] == 0.0
    assert (seeded["setup"]["is_cold"], cold["setup"]["is_cold"]) == (False, True)
    demand_only = [call_json(*args, "--eviction", "lru", *more) for more in ((), ("--cold",))]
    assert demand_only[0]["hits"] == demand_only[1]["hits"]


def test_predictors_say_what_they_rest_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = [[[int(e) for e in rng.choice(8, 2, replace=False)] for _ in range(4)] for _ in range(6)]
    path = tmp_path / "t.parquet"
    write_trace(make_trace(tokens * 5, token_id=np.tile(np.arange(6, dtype=np.int32), 5)), path)
    args = ("lab", "run", path, "--capacity", "50%", "--predict", "token", "--no-oracle")
    [token] = call_json(*args)["predictors"]
    assert (token["name"], token["source"]) == ("token", "recorded")
    assert (token["recall"], token["precision"], token["known"]) == (1.0, 1.0, 24 / 30)
    assert "token: recall 1.00, precision 1.00 (recorded)" in call(*args).stdout


def test_a_predictor_needs_its_columns(trace_file: Path) -> None:
    result = call("lab", "run", trace_file, "--predict", "token")
    assert result.exit_code == 2
    assert "holds no token ids, which this needs: record it with `pyspac trace`" in " ".join(
        result.output.split()
    )


NEEDS_SCORES = ("specmd-2", "specmd-4", "specmd-5")


@pytest.mark.parametrize("name", sorted(set(COMBINATIONS) - set(NEEDS_SCORES)))
def test_every_combination_runs(trace_file: Path, name: str) -> None:
    row = call_json(
        "lab", "run", trace_file, "--policy", name, "--capacity", "25%", "--k", "2", "--no-oracle"
    )
    assert row["policy"] == name


@pytest.mark.parametrize("name", NEEDS_SCORES)
def test_what_needs_the_routers_scores_refuses_a_trace_without(trace_file: Path, name: str) -> None:
    result = call("lab", "run", trace_file, "--policy", name, "--capacity", "25%")
    assert result.exit_code == 2
    assert "--early" in result.output or "--logits" in result.output
    recorded = call_json("lab", "run", DEMO_TRACE, "--policy", name, "--capacity", "25%", "--no-oracle")
    assert recorded["predictor"] in ("recorded", None)


def test_a_sweep_refuses_before_it_runs(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspac.lab.sweep.run_job", lambda job: pytest.fail("a run began"))
    result = call("lab", "sweep", trace_file, "--policies", "lru,specmd-5", "--capacities", "25%", "-j", "1")
    assert result.exit_code == 2
    assert "--early" in result.output


@pytest.mark.parametrize("name", ["specmd-1", "hybrimoe", "sp-moe"])
def test_assumed_guesses_are_named_beside_the_number(trace_file: Path, name: str) -> None:
    args = (trace_file, "--capacity", "25%", "--k", "2", "--accuracy", "0.75", "--no-oracle")
    row = call_json("lab", "run", *args, "--policy", name)
    assert row["predictor"] == "assumed 0.75"
    shown = {
        line.split()[0]: line
        for line in call("lab", "run", *args, "--policy", name).stdout.splitlines()
        if line.split()
    }
    for measure in ("coverage", "predicted_tps", "predicted_tpot_ms"):
        assert "(guesses assumed 0.75)" in shown[measure]


def test_a_name_that_says_no_format_is_refused_before_anything_runs(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspac.commands.lab.run_with_oracle", lambda *_a, **_k: pytest.fail("it ran"))
    done = call("lab", "sweep", trace_file, "-o", tmp_path / "x.txt")
    assert done.exit_code == 2
    assert "x.txt': give a name that ends in .json or .csv" in done.output
    assert list(tmp_path.iterdir()) == []


def test_assumed_guesses_are_named_in_tables_and_figures(
    trace_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "sweep.json"
    done = call("lab", "sweep", trace_file, "-o", results, "--policies", "lru,hybrimoe", "--capacities",
                "10%,25%", "-j", "1")  # fmt: skip
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()}
    assert "assumed 0.85" in lines["hybrimoe"]
    assert "assumed" not in lines["lru"]
    from pyspac.lab import figures

    legends: list[list[str]] = []

    def keep_legend(plt: Any, figure: Any, path: Path) -> Path:
        legends.append([text.get_text() for text in figure.axes[-1].get_legend().get_texts()])
        plt.close(figure)
        return path

    monkeypatch.setattr(figures, "_save", keep_legend)
    figures.draw_all(json.loads(results.read_text()), tmp_path)
    assert legends == [["lru", "hybrimoe (assumed 0.85)"]] * 2


def test_cache_aware_routing_runs_on_the_demo_trace() -> None:
    row = call_json("lab", "run", DEMO_TRACE, "--policy", "specmd-4", "--capacity", "25%", "--no-oracle")
    assert row["fidelity"] < 1.0


def test_recorded_guesses_are_used() -> None:
    row = call_json("lab", "run", DEMO_TRACE, "--policy", "specmd-1", "--capacity", "25%", "--no-oracle")
    assert row["predictor"] == "recorded"


def test_list_has_the_names() -> None:
    known = call_json("lab", "list")
    for name in ("lru", "lfu", "least-stale", "belady", "unbounded", "ema", "spac"):
        assert name in known["eviction"]
    assert call("lab", "list").exit_code == 0
    assert all(known[dimension] == names(dimension) for dimension in DIMENSIONS)


def test_sweep_and_report(trace_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "sweep.json"
    policies = "lru,belady,unbounded,moe-spac,moe-spac-no-evict"
    done = call("lab", "sweep", trace_file, "-o", results, "--policies", policies, "--capacities", "10%,25%",
                "--k", "0,2", "-j", "1")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "predicted" in done.stdout
    rows = json.loads(results.read_text())
    assert len(rows) == 5 * 2 * 2
    assert all(row["oracle_share"] > 0 for row in rows)
    folder = tmp_path / "out"
    folder.mkdir()
    assert call("lab", "report", results, "-o", folder).exit_code == 0
    assert sorted(p.suffix for p in folder.iterdir()) == [".csv", ".png", ".png", ".png"]
    with (folder / "sweep.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_sweep_in_workers_gives_the_same_rows(trace_file: Path, tmp_path: Path) -> None:
    args = ("lab", "sweep", trace_file, "--policies", "lru,ema", "--capacities", "10%,25%")
    for n_workers in (1, 2):
        assert call(*args, "-j", n_workers, "-o", tmp_path / f"{n_workers}.json").exit_code == 0
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()


def test_the_default_sweep_is_fourteen_by_eight() -> None:
    from pyspac.commands.lab import DEFAULT_CAPACITIES

    assert len(DEFAULT_SWEEP) == 14
    assert len(DEFAULT_CAPACITIES.split(",")) == 8


def test_the_documented_policy_file_works(trace_file: Path) -> None:
    # the example of docs/policies.md; in a process of its own, as it stays registered
    args = ("--policy-file", EXAMPLE, "--capacity", "25%", "--no-oracle")
    row = call_json("lab", "run", trace_file, "--eviction", "fading-count:keep=0.5", *args)
    assert row["eviction"] == "fading-count"
    assert 0 < row["hits"] < row["accesses"]
    assert len(EXAMPLE.read_text().splitlines()) <= 25
    assert "(../examples/lab/fading_count.py)" in (ROOT / "docs" / "policies.md").read_text()


def test_list_shows_policies_of_a_file() -> None:
    listed = call("lab", "list", "--policy-file", EXAMPLE)
    assert listed.exit_code == 0, listed.output
    assert "Fading count:" in listed.stdout


@pytest.mark.parametrize("names", [("lru",), ("my-own", "my-own")])
def test_a_name_is_of_one_policy(tmp_path: Path, names: tuple[str, ...]) -> None:
    file = tmp_path / f"own{len(names)}.py"
    text = "from pyspac.lab.policy import Eviction\nfrom pyspac.lab.registry import register\n"
    for i, name in enumerate(names):
        text += f"@register({name!r})\nclass Own{i}(Eviction):\n    pass\n"
    file.write_text(text)
    listed = call("lab", "list", "--policy-file", file)
    assert listed.exit_code == 2, listed.output
    assert f"the name of a policy cannot be '{names[0]}'" in " ".join(listed.output.split())


def test_a_policy_file_may_be_given_twice() -> None:
    assert call("lab", "list", "--policy-file", EXAMPLE, "--policy-file", EXAMPLE).exit_code == 0


def test_a_machine_from_a_file(trace_file: Path, tmp_path: Path) -> None:
    host = {"what": "host memory", "detail": "20.0 GB/s read, 2 threads"}
    doctor = {"findings": [host, {"what": "link", "detail": "8.0 GB/s to CUDA0"}]}
    (tmp_path / "mine.json").write_text(json.dumps(doctor))
    row = call_json("lab", "run", trace_file, "--machine", tmp_path / "mine.json", "--no-oracle")
    assert (row["machine_model"]["host_gb_s"], row["machine_model"]["link_gb_s"]) == (20.0, 8.0)


@pytest.mark.parametrize(
    "args",
    [
        ("--eviction", "nope"),
        ("--prefetch", "nope"),
        ("--miss", "nope"),
        ("--routing", "nope"),
        ("--routing", "cache-aware"),
        ("--policy", "nope"),
        ("--eviction", "lru:knob=1"),
        ("--miss", "drop:keep=x"),
        ("--capacity", "much"),
        ("--capacity", "200%"),
        ("--capacity", "0.0001%"),
        ("--k", "-1"),
        ("--accept", "2"),
        ("--accuracy", "2"),
        ("--machine", "abacus"),
        ("--without", "nope"),
        ("--phase", "nope"),
        ("--first", "0"),
        ("--predict", "nope"),
        ("--predict", "none,token"),
        ("--predict", "token:depth=1"),
        ("--predict", "token", "--eviction", "lru"),
        ("--cold", "--phase", "all"),
        ("--policy", "ema", "--eviction", "lru"),
        ("--policy-file", "missing.py"),
        ("--json", "missing-folder/x.json"),
    ],
)
def test_bad_input_exits_2(trace_file: Path, args: tuple[str, ...]) -> None:
    result = call("lab", "run", trace_file, *args)
    assert result.exit_code == 2, result.output
    assert "pyspac: error:" in result.output


def test_an_unknown_knob_is_answered_with_those_there_are(trace_file: Path) -> None:
    assert (
        "lfu has no knob 'x' (given: 3): give one of keep"
        in call("lab", "run", trace_file, "--eviction", "lfu:x=3").output
    )
    said = call("lab", "run", trace_file, "--eviction", "ema:x=3").output
    assert "ema has no knob 'x' (given: 3): give one of n_levels, ema_decay" in said


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("--eviction", "spac:gamma=nan", "spac:gamma cannot be 'nan': give a whole number"),
        ("--eviction", "spac:gamma=1e400", "spac:gamma cannot be 'inf': give a whole number"),
        ("--eviction", "spac:gamma=1.5", "spac:gamma cannot be '1.5': give a whole number"),
        ("--eviction", "spac:gamma=-2", "n_draft_max cannot be -2"),
        ("--eviction", "ema:budget=nan", "ema:budget cannot be 'nan'"),
        ("--eviction", "ema:ema_decay=nan", "ema:ema_decay cannot be 'nan': give a finite number"),
        ("--eviction", "ema:second_use=nan", "ema:second_use cannot be 'nan'"),
        ("--eviction", "least-stale:cyclic=2", "least-stale:cyclic cannot be '2': give a whole"),
        ("--miss", "drop:keep=1.5", "drop:keep cannot be '1.5': give a whole number from 0 to 10000"),
        ("--miss", "drop:keep=-1", "drop:keep cannot be '-1'"),
        ("--miss", "substitute:tolerance=-0.1", "substitute:tolerance cannot be '-0.1'"),
        ("--prefetch", "draft-gate:cutoff=nan", "draft-gate:cutoff cannot be 'nan'"),
        ("--prefetch", "draft-gate:critical=-1", "draft-gate:critical cannot be '-1'"),
    ],
)  # fmt: skip
def test_a_knob_out_of_range_is_refused(trace_file: Path, option: str, text: str, says: str) -> None:
    result = call("lab", "run", trace_file, option, text, "--k", "4")
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())


def test_a_sweep_with_fewer_than_no_workers_is_refused(trace_file: Path) -> None:
    result = call("lab", "sweep", trace_file, "--jobs", "-1")
    assert result.exit_code == 2
    assert "--jobs cannot be -1: give a whole number of 0 or more" in result.output


def test_bad_files_exit_2(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk")
    assert call("lab", "run", junk).exit_code == 2
    assert call("lab", "sweep", tmp_path / "missing").exit_code == 2
    assert call("lab", "report", junk).exit_code == 2


def test_fewer_than_no_workers_exit_2(trace_file: Path) -> None:
    result = call("lab", "sweep", trace_file, "--policies", "lru", "--capacities", "25%", "-j", "-1")
    assert result.exit_code == 2, result.output
    assert "--jobs cannot be -1" in result.output


def test_bad_targets_exit_2(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_text("junk")
    assert call("trace", "-m", junk, "-p", "x", "-o", tmp_path / "t.parquet").exit_code == 2
    assert call("trace", "-m", junk, "-p", "x", "-o", tmp_path / "no" / "t.parquet").exit_code == 2
    assert not (tmp_path / "t.parquet").exists()


MODELS = ROOT / "pyspac" / "models"
TARGET, DENSE_DRAFT = MODELS / "demo-moe.gguf", MODELS / "demo-draft.gguf"


def recall(trace: Trace, logits: Any) -> float:
    """Share of a token's experts, in layers that ran, that are among the best by `logits`."""
    is_known = np.isfinite(logits).all(axis=-1) & (trace.experts[:, :, 0] >= 0)
    best = np.argsort(-np.nan_to_num(logits.astype(float)), axis=-1)[:, :, : trace.geometry.n_expert_used]
    return float(
        np.mean([np.isin(best[t, il], trace.experts[t, il]).mean() for t, il in np.argwhere(is_known)])
    )


@pytest.mark.model
def test_trace_records_drafts_and_logits(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    text = ("-p", "def read(self", "-n", "16", "--no-display")
    result = call("trace", "-m", TARGET, "-md", DENSE_DRAFT, "-o", out, *text, "--logits", "--early",
                  "--device", "cpu")  # fmt: skip
    assert result.exit_code == 0, result.output
    trace = read_trace(out)
    assert trace.has_drafts
    assert trace.n_prompt > 0
    status = trace.status[trace.status != TokenStatus.PROMPT]
    n_emitted = np.count_nonzero(status == TokenStatus.SAMPLED) + np.count_nonzero(
        status == TokenStatus.ACCEPTED
    )
    assert n_emitted >= 15  # the first of 16 comes from the prompt; the last step may accept beyond the end
    assert trace.logits is not None
    assert trace.early_logits is not None
    assert trace.draft_logits is None
    assert recall(trace, trace.logits) > 0.99  # half precision may swap equals
    # a guess is the better the later it is made; chance is n_expert_used / n_expert
    recalls = [recall(trace, early) for early in trace.early_logits]
    assert recalls[0] > 0.6
    assert recalls[0] > recalls[1] > recalls[2] > 0.3
    n_guesses = [np.isfinite(early[:, :, 0]).any(axis=0).tolist() for early in trace.early_logits]
    assert n_guesses == [[False] * d + [True] * (6 - d) for d in (1, 2, 3)]


@pytest.mark.model
def test_trace_records_token_ids(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    prompt = "for line in lines:"
    assert call("trace", "-m", TARGET, "-o", out, "-p", prompt, "-n", "8", "--no-display").exit_code == 0
    trace = read_trace(out)
    assert trace.token_id is not None
    with Model(ModelParams(path=TARGET)) as model:
        assert trace.token_id[: trace.n_prompt].tolist() == model.vocab.tokenize(prompt)
    assert len(set(trace.token_id[trace.n_prompt :].tolist())) > 1


@pytest.mark.model
def test_trace_records_the_draft_gate(tmp_path: Path) -> None:
    # a draft that is the target itself guesses every expert of the tokens that it computes: all but the last
    out = tmp_path / "t.parquet"
    text = ("-p", "def read(self", "-n", "12", "--draft-max", "3", "--no-display")
    result = call("trace", "-m", TARGET, "-md", TARGET, "-o", out, *text, "--draft-gate", "--early",
                  "--device", "cpu")  # fmt: skip
    assert result.exit_code == 0, result.output
    names = ["token", "next-layer-2", "draft-gate"]
    row = call_json("lab", "run", out, "--predict", ",".join(names), "--capacity", "40%", "--no-oracle")
    assert [predictor["name"] for predictor in row["predictors"]] == names
    assert all(predictor["recall"] > 0.5 for predictor in row["predictors"][1:])
    trace = read_trace(out)
    assert trace.draft_logits is not None
    assert recall(trace, trace.draft_logits) > 0.97
    decoded = trace.status != TokenStatus.PROMPT
    is_last = np.append(trace.step[1:] != trace.step[:-1], True)
    has_guess = np.isfinite(trace.draft_logits[:, :, 0]).all(axis=1)
    assert has_guess[decoded & ~is_last].all()
    assert not has_guess[decoded & is_last & (np.bincount(trace.step)[trace.step] > 1)].any()


@pytest.mark.parametrize(
    ("draft", "said"),
    [((), "name one with -md"), (("-md", DENSE_DRAFT), "demo-draft.gguf has a width of 160")],
)
def test_a_draft_gate_needs_a_draft_of_the_target_s_width(
    tmp_path: Path, draft: tuple[Any, ...], said: str
) -> None:
    result = call("trace", "-m", TARGET, "-o", tmp_path / "t.parquet", *draft, "-p", "x", "--draft-gate")
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_disk_that_is_measured(trace_file: Path) -> None:
    """Memory is the device and the disk the link; policies run on it as on any machine."""
    model = ROOT / "pyspac" / "models" / "demo-moe.gguf"
    argv = ("--eviction", "ema", "--miss", "fetch", "--capacity", "50%", "--k", "0", "--no-oracle")
    row = call_json("lab", "run", trace_file, *argv, "--machine", f"disk={model}")
    found = row["machine_model"]
    assert (row["machine"], found["link_depth"]) == ("disk", 10)
    assert found["link_gb_s"] == found["host_gb_s"] > 0
    assert found["device_gb_s"] != PRESETS["cpu-ssd"].device_gb_s
    assert row["hits"] > 0


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("disk", "disk=MODEL"),
        ("disk=none.gguf", "there is no such file"),
        (f"disk={ROOT / 'pyspac' / 'models' / 'demo-draft.gguf'}", "a model that has experts"),
    ],
)
def test_a_disk_of_no_model(trace_file: Path, machine: str, said: str) -> None:
    result = call("lab", "run", trace_file, "--machine", machine)
    assert result.exit_code == 2
    assert said in result.stderr


def test_copies_at_once_share_the_latency() -> None:
    """Three copies of 1 MB at 1 GB/s and 100 us, two at once: 2 x 100 us and 3 x 1 ms."""
    machine = replace(PRESETS["cpu-ssd"], link_gb_s=1.0, link_latency_us=100.0, link_depth=2)
    assert sum(machine.copy_us(1e6, nth) for nth in range(3)) == pytest.approx(3200)
    with pytest.raises(ConfigError, match="link_depth"):
        replace(machine, link_depth=0)
