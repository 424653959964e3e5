"""The commands on tiny models: split equals stock, the JSON, the streams, Ctrl-C, the documentation."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import generate_cli_docs
import gguf_models
import input_models
import pytest
from typer.testing import CliRunner, Result

import pyspac
from pyspac.cli import app
from pyspac.commands.demo import DRAFT, TARGET
from pyspac.engine.engine import tokens_per_expert

KEYS = {
    *(
        "mode",
        "device",
        "emulated",
        "model",
        "draft",
        "text",
        "token_ids",
        "n_tokens",
        "n_steps",
        "n_drafted",
    ),
    *("kernels", "n_ubatch"),
    *("ttft_ms", "tpot_ms", "tps", "n_accepted", "acceptance_rate", "acceptance_length"),
    *("experts", "layers", "scheduler"),
}
EXPERT_KEYS = {
    *("n_slots", "pool_bytes", "n_hit", "n_miss", "n_late", "n_loads", "n_evictions", "loaded_bytes"),
    *("n_staged", "staged_bytes", "staged_us", "stage_wait_us", "n_steps_with_both"),
}
SCHEDULER_KEYS = {"estimator", "step_us_p50", "step_us_p99", "balance", "copies", "whole"}
PROMPT = "def f(x): return f(x); def f("


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    input_models.write_target(folder / "target.gguf")
    input_models.write_draft(folder / "draft.gguf")
    return folder


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def run_json(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """`pyspac run` on the target of `folder`; the JSON object."""
    out = folder / "out.json"
    common = ("run", "-m", folder / "target.gguf", "--device", "cpu", "-t", "1", "--temp", "0", "--json", out)
    result = invoke(*common, "-p", PROMPT, "-n", "40", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(out.read_text())


# ---- split and stock -----------------------------------------------------------------------------

STOCK = ("--stock", "--no-repack")  # the bits of the split
DRAFTERS = {
    "draft": ["-md", "draft.gguf", "--speculation", "static"],
    "ngram-simple": ["--spec-type", "ngram-simple", "--speculation", "static"],  # ngram is the engine's own
    "none": [],
}
SAMPLERS = {"greedy": [], "sampled": ["--temp", "0.8", "--seed", "5"]}


@pytest.fixture(scope="module")
def stock_ids(models: Path) -> list[int]:
    """The text of llama.cpp without the engine, as tokens."""
    return list(run_json(models, *STOCK)["token_ids"])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_split_equals_stock(drafter: str, sampler: str, models: Path) -> None:
    """On the CPU token for token, drafts and acceptance included, while experts move."""
    arguments = [str(models / a) if a.endswith(".gguf") else a for a in DRAFTERS[drafter] + SAMPLERS[sampler]]
    split = run_json(models, "--cache", "40%", *arguments)
    stock = run_json(models, *STOCK, *arguments)
    for key in ("token_ids", "text", "n_drafted", "n_accepted", "n_steps"):
        assert split[key] == stock[key], key
    assert split["experts"]["n_hit"] > 0
    assert split["experts"]["n_miss"] > 0
    assert split["experts"]["n_steps_with_both"] > 0
    assert split["n_tokens"] == 40


@pytest.mark.parametrize(
    ("drafter", "holds"), [(("-md", "draft.gguf"), True), (("--spec-type", "ngram"), False)]
)
def test_greedy_text_does_not_depend_on_the_drafts(
    drafter: tuple[str, str], holds: bool, models: Path
) -> None:
    """Near ties apart (another batch width is another kernel), which this model and prompt do not have."""
    plain = run_json(models, "--cache", "40%")
    arguments = [str(models / a) if a.endswith(".gguf") else a for a in drafter]
    drafted = run_json(models, "--cache", "40%", *arguments, "--draft-max", "3")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["n_drafted"] > 0
    assert drafted["acceptance_rate"] < 1
    assert (drafted["acceptance_rate"] > 0, drafted["acceptance_length"] > 1) == (holds, holds)


@pytest.mark.parametrize("estimator", ["ema", "spac", "lru", "lfu", "last", "static"])
def test_every_estimator(estimator: str, models: Path, stock_ids: list[int]) -> None:
    result = run_json(models, "--cache", "40%", "--policy", f"estimator='{estimator}'\nthreshold=1")
    assert result["scheduler"]["estimator"] == estimator
    assert result["token_ids"] == stock_ids


# (baseline, whether misses are copied while their layer waits)
BASELINES = [
    ("least-stale", True), ("lru+fetch", True), ("lfu+fetch", True), ("lhu+fetch", True),
    ("score+fetch", True),
    ("least-stale:cyclic=1+fetch", True), ("farthest-layer+fetch", True),
    ("farthest-layer:cyclic=1+fetch", True), ("ema+fetch", True), ("spac+fetch", True),
    ("lru+balance", False), ("ema+balance", False), ("lru+host-admit", False),
    ("lru+fetch+per-layer", True),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "waits"), BASELINES)
def test_every_baseline(policy: str, waits: bool, models: Path, stock_ids: list[int]) -> None:
    result = run_json(models, "--cache", "60%", "--policy", policy)
    assert result["token_ids"] == stock_ids
    named = policy if "+" in policy else f"{policy}+fetch"
    assert result["scheduler"]["estimator"] == named
    experts = result["experts"]
    assert experts["n_loads"] > 0
    # of a device that is the CPU itself, "balance" may find that once the slots are full copies gain nothing
    assert experts["n_evictions"] > 0 or policy.endswith("+balance")
    if waits and not policy.startswith(("ema", "spac")):  # with a plan, copies may be under way
        assert experts["n_loads"] == experts["n_miss"]


def test_a_file_may_name_a_baseline_and_a_link(models: Path, stock_ids: list[int], tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text("baseline = 'lru+fetch'\n")
    assert run_json(models, "--cache", "60%", "--policy", file)["scheduler"]["estimator"] == "lru+fetch"
    file.write_text("baseline = 'lru+fetch'\ncopy_gb_s = 0.05\n")
    result = run_json(models, "--cache", "60%", "--policy", file)
    assert result["emulated"] is True
    assert result["token_ids"] == stock_ids


@pytest.mark.parametrize("part", ["specue", "adabc", "hetwb", "prefetch", "evict", "sd"])
def test_every_ablation(part: str, models: Path) -> None:
    result = run_json(
        models, "--cache", "40%", "-md", models / "draft.gguf", "--policy", f"without=['{part}']"
    )
    assert result["n_tokens"] == 40
    if part == "evict":
        assert result["experts"]["n_evictions"] == 0
    if part == "sd":
        assert result["n_drafted"] == 0
        assert result["draft"] is None


def test_throttled_link_is_called_emulated(models: Path, stock_ids: list[int]) -> None:
    result = run_json(models, "--cache", "40%", "--policy", "copy_gb_s=0.05")
    assert result["emulated"] is True
    assert result["token_ids"] == stock_ids


@pytest.fixture
def rpc_server(bin_dir: Path) -> Iterator[str]:
    """A ggml-rpc-server whose device is the CPU: HOST:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [bin_dir / "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        wait_for_port(port)
        yield f"127.0.0.1:{port}"
        server.kill()


def wait_for_port(port: int) -> None:
    end_s = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end_s, "the server does not listen"
            time.sleep(0.05)


def test_split_with_a_remote_device(models: Path, rpc_server: str, tmp_path: Path) -> None:
    """In a process of its own, as ggml keeps a remote device for good. Same kernels, so the same text."""
    texts = []
    for mode in (["--cache", "40%", "--host-kernels", "ggml"], [*STOCK]):
        command = [
            sys.executable,
            "-m",
            "pyspac",
            "run",
            "-m",
            str(models / "target.gguf"),
            "--rpc",
            rpc_server,
        ]
        command += ["-md", str(models / "draft.gguf"), "-p", PROMPT, "-n", "40", "-t", "1", "--temp", "0"]
        command += ["--json", "-", *mode]
        done = subprocess.run(command, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout))
    split, stock = texts
    assert (split["mode"], split["emulated"], stock["mode"]) == ("split", False, "stock")
    assert split["device"] == stock["device"] == "RPC0"
    assert split["token_ids"] == stock["token_ids"]
    assert split["experts"]["n_steps_with_both"] > 0


def test_a_predictor_changes_no_text_and_is_reported(models: Path) -> None:
    texts = []
    for predict in ("none", "token"):
        result = invoke(
            "run", "-m", models / "target.gguf", "-md", models / "draft.gguf", "-p", PROMPT, "-n", "60",
            "-t", "1", "--device", "cpu", "--cache", "40%", "--draft-max", "3", "--temp", "0",
            "--predict", predict, "--json", "-",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout))
    without, predicted = texts
    assert predicted["token_ids"] == without["token_ids"]
    assert without["predictors"] == []
    [token] = predicted["predictors"]
    assert token["name"] == "token"
    assert 0 <= token["n_copies_used"] <= token["n_copied"] <= token["n_planned"]
    assert (
        token["us_per_step"] is None or token["us_per_step"] > 0
    )  # a busy machine may leave no time to look
    assert {"known", "recall", "precision"} <= token.keys()  # None until a token came again


def test_an_unknown_predictor_is_refused(models: Path) -> None:
    result = invoke("run", "-m", models / "target.gguf", "-p", "x", "--predict", "tokens,none")
    assert result.exit_code == 2
    assert "error: --predict cannot be 'tokens': give one or more of token, next-layer," in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing drafts, so there is nothing to explain"),
        (("--spec-type", "ngram", "--draft-max", "3"), "the draft length is fixed at 3, so there is nothing"),
        (("--spec-type", "ngram", "--speculation", "off"), "utility by K; why"),
        (("--spec-type", "ngram"), "the plain step's time is not sure"),
    ],
)
def test_explain_says_what_there_is_to_say(
    options: tuple[str, ...], message: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke("run", "-m", models / "target.gguf", "-p", "x", "-n", "6", "--explain", *options)
    assert result.exit_code == 0
    assert message in result.stderr


def test_all_layers_declined_is_an_error(tmp_path: Path) -> None:
    model = gguf_models.write_model(tmp_path / "model.gguf", gguf_models.NOT_SPLIT)
    result = invoke("run", "-m", model, "-p", "x", "-n", "2", "--device", "cpu")
    assert result.exit_code == 2
    assert "no MoE layer can be split: two sets of experts in one layer (3 layers)" in result.stderr
    assert result.stdout == ""


def test_declined_layers_are_counted_by_reason(tmp_path: Path) -> None:
    model = gguf_models.write_model(tmp_path / "model.gguf", gguf_models.NOT_SPLIT)
    out = tmp_path / "out.json"
    result = invoke("run", "-m", model, "-p", "x", "-n", "2", "--device", "none", "--json", out)
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    declined = {"two sets of experts in one layer": 3}
    assert found["layers"] == {"split": 0, "declined": declined, "unpinned": 0}
    assert found["ttft_ms"] > 0


# ---- JSON and streams ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["split", "stock"])
def test_json_object(mode: str, models: Path) -> None:
    result = run_json(models, *(["--stock"] if mode == "stock" else ["--cache", "40%"]))
    assert result.keys() >= KEYS
    assert result["experts"].keys() == EXPERT_KEYS
    assert result["layers"].keys() == {"split", "declined", "unpinned"}
    assert result["scheduler"].keys() == SCHEDULER_KEYS
    assert (result["mode"], result["device"]) == (mode, "CPU")
    assert result["emulated"] is (mode == "split")
    assert len(result["token_ids"]) == result["n_tokens"] == 40
    assert result["n_steps"] == 39
    assert result["tps"] == pytest.approx(1000 / result["tpot_ms"])


def test_no_tokens_are_none(models: Path) -> None:
    """llama-server itself makes one with `n_predict` 0."""
    result = invoke("run", "-m", models / "target.gguf", "-p", PROMPT, "-n", "0", "-t", "1", "--json", "-")
    answer = json.loads(result.stdout)
    assert (answer["n_tokens"], answer["token_ids"], answer["text"]) == (0, [], "")
    assert answer["stop_reason"] == "length"
    assert (answer["ttft_ms"], answer["tpot_ms"]) == (None, None)


def test_json_on_stdout_is_alone_there(models: Path) -> None:
    """Seen from outside the process, so that what libraries print counts as well."""
    command = [sys.executable, "-m", "pyspac", "run", "-m", str(models / "target.gguf"), "--device", "cpu"]
    done = subprocess.run([*command, "-p", "hi", "-n", "4", "--json", "-"], capture_output=True, timeout=120)
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert b"tokens/s" in done.stderr
    assert result["text"].encode() in done.stderr


def test_text_on_stdout_is_alone_there(models: Path) -> None:
    common = ("run", "-m", models / "target.gguf", "--device", "cpu", "-p", PROMPT, "-n", "40", "--stock")
    result = invoke(*common, "-t", "1", "--temp", "0")
    assert result.stdout == run_json(models, "--stock")["text"] + "\n"


def test_table_fits_80_columns(models: Path) -> None:
    common = ("run", "-m", models / "target.gguf", "-md", models / "draft.gguf", "--device", "cpu")
    drafting = ("--speculation", "static", "--ignore-eos")  # auto may see that no draft pays
    result = invoke(*common, "-p", PROMPT, "-n", "40", "--cache", "40%", *drafting)
    lines = result.stderr.splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("tokens/s", "accepted", "covered", "loads", "host experts", "device experts", "emulated"):
        assert word in result.stderr, word


def test_prompt_from_a_file_is_the_same_prompt(models: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    common = ("run", "-m", models / "target.gguf", "--device", "cpu", "--stock", "-n", "10", "--temp", "0")
    assert invoke(*common, "-f", tmp_path / "prompt.txt").stdout == invoke(*common, "-p", PROMPT).stdout


def test_json_replaces_the_old_file_whole(models: Path) -> None:
    out = models / "out.json"
    out.write_text("old")
    assert run_json(models, "--stock")["mode"] == "stock"
    assert not list(models.glob(".out.json*")), "a temporary file is left"


def test_full_context_says_so(models: Path) -> None:
    """llama.cpp rounds it up to 256."""
    common = ("run", "-m", models / "target.gguf", "--device", "cpu", "--cache", "40%", "-p", PROMPT)
    result = invoke(*common, "-c", "64", "--temp", "0", "--ignore-eos")
    assert result.exit_code == 0
    assert "the context is full (256 tokens" in result.stderr
    assert "a larger one with -c" in " ".join(result.stderr.split())


@pytest.mark.parametrize("mode", [["--stock"], ["--cache", "40%"]], ids=["stock", "split"])
def test_ctrl_c_ends_with_the_figures(mode: list[str], tmp_path: Path) -> None:
    input_models.write_target(tmp_path / "long.gguf", context_length=30_000)
    command = [
        sys.executable,
        "-m",
        "pyspac",
        "run",
        "-m",
        str(tmp_path / "long.gguf"),
        "--device",
        "cpu",
        *mode,
    ]
    command += ["-p", "hi", "-c", "0", "--ignore-eos", "--json", str(tmp_path / "out.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(8)  # it is generating
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert b"stopped: interrupted" in stderr
    assert b"Traceback" not in stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["stop_reason"] == "interrupted"
    assert 0 < result["n_tokens"] < 29_000


# ---- the other commands --------------------------------------------------------------------------


def test_inspect(models: Path) -> None:
    result = invoke("inspect", models / "target.gguf", "--vram", "1.024")
    assert result.exit_code == 0
    for text in ("qwen3moe", "16 per layer, 4 used", "gate,up=Q4_K down=Q6_K", "0.122", "15%", "1.024 MiB"):
        assert text in result.stdout, text


def test_inspect_without_a_device(models: Path) -> None:
    """As many tokens of a prompt at once as the kernels of this machine want for its 16 experts, 4 used."""
    found = json.loads(invoke("inspect", models / "target.gguf", "--json", "-").stdout)
    assert found["host_n_ubatch"] == max(512, 16 // 4 * tokens_per_expert())
    shown = invoke("inspect", models / "target.gguf").stdout
    assert f"without a GPU this machine computes {found['host_n_ubatch']} tokens" in " ".join(shown.split())


def test_a_run_tells_its_kernels_and_tokens_at_once(models: Path) -> None:
    """As many as `inspect` says, or -ub; llama.cpp's own ways tell none."""
    out = models / "out.json"
    common = ("run", "-m", models / "target.gguf", "-p", PROMPT, "-n", "2", "--json", out, "--device", "none")
    found = []
    for flags in ([], ["-ub", "64"], ["--stock"]):
        assert invoke(*common, *flags).exit_code == 0
        found.append(json.loads(out.read_text()))
    if found[0]["kernels"] is None:
        pytest.skip("the engine has no kernels for this processor")
    wanted = json.loads(invoke("inspect", models / "target.gguf", "--json", "-").stdout)["host_n_ubatch"]
    assert [row["n_ubatch"] for row in found] == [wanted, 64, None]
    assert [row["kernels"] for row in found] == [found[0]["kernels"], found[0]["kernels"], None]


def test_inspect_beside_a_device(models: Path) -> None:
    """Half on the device beside what else it holds, a quarter of the bytes in memory, less the disk's blocks
    around small experts."""
    alone = json.loads(invoke("inspect", models / "target.gguf", "--json", "-").stdout)
    size = int(alone["experts_bytes"] / 2 + sum(alone["needs"].values()))
    argv = ["inspect", models / "target.gguf", "--vram", f"{size}B", "--ram", "25%"]
    result = json.loads(invoke(*argv, "--json", "-").stdout)
    (found,) = result["places"]
    assert found["n_on_device"] == result["fits"][0]["n_experts_of_gpu"]
    n_all = found["n_on_device"] + found["n_in_memory"] + found["n_on_disk"]
    assert found["n_on_device"] == pytest.approx(n_all / 2, abs=1)
    assert n_all / 8 < found["n_in_memory"] < n_all / 4
    assert "where the experts are" in invoke(*argv).stdout


@pytest.mark.parametrize("size", ["-1", "nan", "inf", "8T", "25%", "auto"])
def test_inspect_with_no_amount_of_memory(models: Path, size: str) -> None:
    result = invoke("inspect", models / "target.gguf", "--vram", size)
    assert result.exit_code == 2, result.output
    assert "GiB (8G)" in result.output


def test_inspect_with_a_context_below_none(models: Path) -> None:
    result = invoke("inspect", models / "target.gguf", "-c", "-5")
    assert result.exit_code == 2
    assert "-c cannot be -5" in result.stderr


def test_inspect_json(models: Path) -> None:
    result = json.loads(invoke("inspect", models / "target.gguf", "--vram", "1G", "--json", "-").stdout)
    assert result["fits"] == [{"gib": 1.0, "n_experts": 48, "n_experts_of_gpu": 48, "n_ubatch": 512}]
    assert len(result["layers"]) == result["n_layer"] == 3


def test_inspect_counts_the_draft_model(models: Path) -> None:
    """A GPU with room for half of the experts beside the target has less beside the draft too."""

    def look(*more: object) -> dict[str, Any]:
        return json.loads(invoke("inspect", TARGET, "--vram", "0.77G", "--json", "-", *more).stdout)  # type: ignore[no-any-return]

    alone, drafted, longer = look(), look("-md", DRAFT), look("-md", DRAFT, "-c", "512")
    assert alone["needs"]["draft"] == 0
    assert drafted["needs"]["draft"] > 0
    assert drafted["needs"]["kv"] > alone["needs"]["kv"]
    assert drafted["needs"]["kv"] == 2 * longer["needs"]["kv"]  # of the model's own 1024 tokens
    counts = [found["fits"][0]["n_experts_of_gpu"] for found in (alone, longer, drafted)]
    assert counts == sorted(counts, reverse=True)
    text = invoke("inspect", TARGET, "-md", DRAFT).stdout
    assert "beside the experts a GPU holds" in text
    assert ", draft " in text


def test_inspect_experts_on_disk() -> None:
    """Speeds are measured, so only their order is known: more memory is no slower; too little is said."""
    found = json.loads(
        invoke("inspect", TARGET, "--ram", "1G", "--ram", "1", "--ram", "6M", "--json", "-").stdout
    )
    tier, n_experts = found["tier"], found["n_experts_total"]
    assert tier["disk"]["depth_32_gb_s"] > 0
    assert tier["host_gb_s"] > 0
    too_little, some, all_ = tier["predicted"]
    assert (too_little["tps_alike"], too_little["tps_recorded"]) == (None, None)
    assert some["n_in_memory"] + some["n_on_disk"] == n_experts
    assert 0 < some["tps_alike"] < some["tps_recorded"] < all_["tps_alike"] == all_["tps_recorded"]
    assert all_["n_on_disk"] == 0
    text = invoke("inspect", TARGET, "--ram", "1", "--ram", "6").stdout
    assert "predicted" in text
    assert "too little: 3 MiB at least" in text
    assert "at depth 32" in text


def test_inspect_takes_memory_as_run_does() -> None:
    tier = json.loads(invoke("inspect", TARGET, "--ram", "50%", "--ram", "auto", "--json", "-").stdout)[
        "tier"
    ]
    half, all_ = tier["predicted"]
    assert half["ram_bytes"] * 2 == pytest.approx(all_["ram_bytes"], abs=2)
    assert all_["n_on_disk"] == 0, "no more than all experts take"


@pytest.mark.parametrize("ram", ["-1", "nan", "0", "150%", f"{10**400}"])
def test_inspect_refuses_an_impossible_amount_of_memory(ram: str) -> None:
    result = invoke("inspect", TARGET, "--ram", ram)
    assert result.exit_code == 2
    assert "give MiB (8000), GiB (8G)" in " ".join(result.stderr.split())


def test_inspect_dense(tmp_path: Path) -> None:
    result = invoke("inspect", input_models.write_dense(tmp_path / "dense.gguf"))
    assert result.exit_code == 0
    assert "no experts to split" in result.stdout


@pytest.mark.model
def test_demo(tmp_path: Path) -> None:
    result = invoke("demo", "-n", "16", "-t", "1", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.stderr
    assert "equal, token for token" in result.stderr
    assert "emulated on the CPU" in result.stderr
    both = json.loads((tmp_path / "out.json").read_text())
    assert both["equal"] is True
    assert both["split"]["token_ids"] == both["stock"]["token_ids"]
    assert both["split"]["experts"]["n_steps_with_both"] > 0
    assert both["split"]["n_accepted"] > 0
    assert set(both["tps"]) == {"stock", "repacked", "pyspac"}
    assert "The fast way on a machine without a GPU" in result.stderr


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"pyspac {pyspac.__version__}\n"
    assert "run" in invoke("--help").stdout
    command = [sys.executable, "-m", "pyspac", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.startswith("pyspac ")


@pytest.mark.parametrize("command", ["run", "demo", "inspect", "doctor"])
def test_every_option_has_help(command: str) -> None:
    import typer

    group: Any = typer.main.get_command(app)
    assert all(param.help for param in group.commands[command].params)
    assert group.commands[command].help


def test_documentation_is_up_to_date() -> None:
    assert generate_cli_docs.CLI_DOCS.read_text(encoding="utf-8") == generate_cli_docs.render(app), (
        "docs/cli.md is stale: run python scripts/generate_cli_docs.py"
    )


def test_help_needs_no_library(tmp_path: Path) -> None:
    """Help and inspect work where nothing is built."""
    environment = os.environ | {"PYSPAC_BUILD_DIR": str(tmp_path)}
    model = input_models.write_target(tmp_path / "target.gguf")
    for arguments in (["run", "--help"], ["inspect", str(model)]):
        command = [sys.executable, "-m", "pyspac", *arguments]
        assert subprocess.run(command, capture_output=True, timeout=60, env=environment).returncode == 0
    command = [
        sys.executable,
        "-m",
        "pyspac",
        "run",
        "-m",
        str(model),
        "-p",
        "x",
        "--stock",
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert "no built engine" in done.stderr
