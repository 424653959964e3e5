"""The parts of pyspac.server that need no server: command lines, memory, ports, pacing, back-off, metrics."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import gguf_models
import numpy as np
import pytest
import typer
from fake_rpc import GREETING_BYTES, fake_server, says
from gguf import GGMLQuantizationType as Type
from serving import DRAFT, HOST, TARGET, free_port, run_pyspac, wait_for
from typer.testing import CliRunner

from pyspac._native import bin_dir
from pyspac.cli import app
from pyspac.engine.board import BoardGeometry, LayerMode, LocalBoard, Residency
from pyspac.engine.devices import Device, choose_device, cpu_device
from pyspac.engine.limits import AUTO_MARGIN_BYTES, MAX_BATCH
from pyspac.engine.rpc import NoAnswerError
from pyspac.engine.step import StepRecord, StepTotals
from pyspac.engine.values import check_variable
from pyspac.errors import ConfigError, NoProcessError, UsageError
from pyspac.forward.options import CacheSize
from pyspac.model import device_needs, prompt_piece
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import read_header
from pyspac.scheduler.activations import ActivationDrain
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.policy import DEFAULT_POLICY, Policy
from pyspac.scheduler.scheduler import Scheduler
from pyspac.server import at_once, board_file, device_probe, log, memory, passed_on, plan
from pyspac.server.arguments import HUGE_PAGES, Launch, attach_argv, n_threads, server_argv, server_env
from pyspac.server.attachment import Attachment
from pyspac.server.backoff import Backoff
from pyspac.server.child import Child, run_to_end
from pyspac.server.download import ModelFiles, StoppedError
from pyspac.server.exporter import serve_metrics
from pyspac.server.health import choose_port, get_json, is_healthy
from pyspac.server.options import AttachOptions, ServeOptions, choose_drafting, drafting_of
from pyspac.server.pacer import IDLE_POLL_S, Pacer
from pyspac.server.plan import plan_launch
from pyspac.server.secrets import take_secrets
from pyspac.server.settings import to_json
from pyspac.server.start import start_server
from pyspac.talk.scheduling import scheduling
from pyspac.units import GIB, MIB


def small_board() -> LocalBoard:
    return LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=4, n_expert_used=2, n_slots=3))


# ---- command lines

READ_BY_FLAGS = {"LLAMA_ARG_DEVICE": None, "LLAMA_ARG_RPC": None}
LAUNCH = Launch(port=8081, board="b", cache="25%", n_ctx=512)


def test_servers_command_line() -> None:
    options = ServeOptions(model=Path("t.gguf"), draft=Path("d.gguf"), device="cpu", passed=("-np", "4"))
    argv = server_argv(options, LAUNCH, Path("/bin"))
    assert " ".join(argv) == (
        "/bin/llama-server -m t.gguf -md d.gguf --spec-type draft-simple --spec-draft-n-max 8 "
        "-c 512 --spac-cache 25% --spac-board b --host 127.0.0.1 --port 8081 --metrics --alias t "
        "--device none --cors-origins  --no-cors-credentials --timeout 30 -np 4"
    )
    assert server_env(options) == READ_BY_FLAGS | {"PYSPAC_MAX_BATCH": "36", "PYSPAC_DEVICE": "cpu"}
    assert server_env(replace(options, device="auto"))["PYSPAC_DEVICE"] == "auto"  # never the user's own
    longer = replace(options, attach=AttachOptions(scheduler=SchedulerConfig(n_draft_max=20)))
    assert server_env(longer)["PYSPAC_MAX_BATCH"] == "84"  # no step falls out of the split
    assert server_env(replace(longer, passed=("-np", "1")))["PYSPAC_MAX_BATCH"] == "21"
    many = replace(options, passed=("-np", "64"))
    assert server_env(many)["PYSPAC_MAX_BATCH"] == "512", "the engine splits no more, and refuses to attach"


def test_server_slots_are_those_of_llama_servers_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "8")
    options = ServeOptions(model=Path("t.gguf"))
    assert server_env(options)["PYSPAC_MAX_BATCH"] == "72"
    assert replace(options, passed=("-np", "2")).n_server_slots == 2, "a flag comes first"


def test_llama_servers_variables_are_read_as_our_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("LLAMA_ARG_PORT", str(port))
    monkeypatch.setenv("LLAMA_ARG_HOST", "localhost")
    seen: list[ServeOptions] = []
    monkeypatch.setattr("pyspac.server.supervisor.serve", lambda options: seen.append(options) or 0)
    done = CliRunner().invoke(app, ["serve", str(TARGET)])
    assert done.exit_code == 0, done.stderr
    assert (seen[0].port, seen[0].host) == (port, "localhost")
    CliRunner().invoke(app, ["serve", str(TARGET), "--port", "0", "--host", "127.0.0.2"])
    assert (seen[1].port, seen[1].host) == (0, "127.0.0.2")
    CliRunner().invoke(app, ["serve", str(TARGET), "--host", "127.0.0.1"])
    assert seen[2].host == "127.0.0.1", "a flag comes first, if it says the default, too"
    monkeypatch.setenv("LLAMA_ARG_DEVICE", "none")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "4096")
    monkeypatch.setenv("LLAMA_ARG_HF_REPO", "")  # nothing
    for device in ((), ("-dev", "auto")):
        CliRunner().invoke(app, ["serve", str(TARGET), *device])
    assert (seen[3].device, seen[4].device) == ("none", "auto")
    assert seen[4].n_ctx == 4096
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "many")
    done = CliRunner().invoke(app, ["serve", str(TARGET)])
    assert done.exit_code == 2
    assert "LLAMA_ARG_CTX_SIZE cannot be 'many'" in done.stderr


def test_threads_and_layers_are_those_of_llama_servers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_THREADS", "3")
    monkeypatch.setenv("LLAMA_ARG_N_GPU_LAYERS", "7")
    own = ServeOptions(model=Path("t"), socket=Path("s.sock"))
    assert n_threads(own) == 3
    assert "--threads" not in server_argv(own, LAUNCH, Path("/bin"))
    assert own.n_gpu_layers == 7
    told = replace(own, passed=("-t", "1", "-ngl", "2"))
    assert (n_threads(told), told.n_gpu_layers) == (1, 2)


def test_every_sampler_that_is_let_through_is_known_to_llama_server() -> None:
    names = ";".join(sorted(passed_on._SPELLINGS))
    letters = passed_on._SAMPLER_LETTERS
    given = ["--samplers", names, "--sampler-seq", letters]
    done = run_to_end("llama-server", [str(bin_dir() / "llama-server"), *given, "--version"])
    assert "unable to match sampler" not in done.stderr
    with pytest.raises(UsageError, match="no sampler is '9'"):
        passed_on.check_values(ServeOptions(model=Path("t"), passed=("--sampler-seq", f"{letters}9")))


def test_an_own_server_has_nothing_of_the_environment_that_is_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE", "LLAMA_ARG_API_PREFIX", "LLAMA_ARG_SSL_CERT_FILE")
    names += ("PYSPAC_MTP", "PYSPAC_MASKS", "PYSPAC_NGRAM", "PYSPAC_FILL")
    own = ServeOptions(model=Path("t.gguf"), socket=Path("s.sock"))
    for options in (own, replace(own, stock=True)):
        assert all(server_env(options)[name] is None for name in names)
        assert not any(name in server_env(replace(options, socket=None)) for name in names)
    monkeypatch.setenv("LLAMA_API_KEY", "a,b")
    with TemporaryFile() as out:
        assert Child("env", ["env"], env={"LLAMA_API_KEY": None, "OTHER": "1"}, stdout=out).wait(10)
        out.seek(0)
        said = out.read()
    assert b"OTHER=1" in said
    assert b"LLAMA_API_KEY" not in said


@pytest.mark.parametrize("without", ["prompt", "prefetch"])
def test_where_prompts_teach_nothing_the_engine_fills_no_slots(without: str) -> None:
    scheduler = SchedulerConfig(without=without)  # type: ignore[arg-type]
    options = ServeOptions(model=Path("t.gguf"), attach=AttachOptions(scheduler=scheduler))
    assert server_env(options)["PYSPAC_FILL"] == "0"


def test_predictors_of_the_engine_reach_it_by_the_environment() -> None:
    model = Path("t.gguf")
    config = SchedulerConfig(predict=("token", "next-layer-2", "draft-gate"))
    attach = AttachOptions(scheduler=config)
    options = ServeOptions(model=model, draft=model, device="cpu", attach=attach)
    assert server_env(options)["PYSPAC_PREDICT"] == "next-layer-2,draft-gate"
    assert "PYSPAC_PREDICT" not in server_env(ServeOptions(model=model))
    with pytest.raises(UsageError, match="needs a draft model as wide as the target"):
        ServeOptions(model=model, device="cpu", attach=attach)
    in_engine = AttachOptions(scheduler=SchedulerConfig(predict=("next-layer-2", "draft-gate")))
    on_disk = ServeOptions(model=model, draft=model, device="none", ram="8G", attach=in_engine)
    assert server_env(on_disk, 700)["PYSPAC_PREDICT"] == "next-layer-2,draft-gate"
    on_disk = ServeOptions(
        model=model, device="none", ram="8G",
        attach=AttachOptions(scheduler=SchedulerConfig(predict=("next-layer",))),
    )  # fmt: skip
    assert server_env(on_disk, 700)["PYSPAC_PREDICT"] == "next-layer"
    assert "PYSPAC_PREDICT" not in server_env(on_disk)  # all of it fits
    assert not on_disk.has_scheduler
    token = replace(on_disk, attach=AttachOptions(scheduler=SchedulerConfig(predict=("token",))))
    assert token.has_scheduler, "it works there"
    assert "PYSPAC_PREDICT" not in server_env(token, 700)


def test_the_engine_serves_types_without_kernels_where_experts_stay_on_disk(tmp_path: Path) -> None:
    """Else llama.cpp does, with its own."""
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe", [(Type.F32,) * 3])
    for ram, has_engine in (("80%", True), ("100%", False)):
        options = ServeOptions(model=model, device="none", ram=ram)
        sizes = plan._sizes(options, ModelFiles(model=model, draft=None), choose_device("none"))
        assert (sizes.has_engine, sizes.ram_bytes is not None) == (has_engine, has_engine)


def test_a_variable_of_ours_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory the engine may take was decided before; nothing, where all experts are loaded."""
    monkeypatch.setenv("PYSPAC_RAM", "8G")
    options = ServeOptions(model=Path("t.gguf"), device="none")
    assert server_env(options)["PYSPAC_RAM"] == ""
    assert server_env(options, 2621440)["PYSPAC_RAM"] == "2621440B"


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("PYSPAC_LOSSY", "drop:x", "PYSPAC_LOSSY cannot be 'drop:x'"),
        ("PYSPAC_BASELINE", "lru", "PYSPAC_BASELINE cannot be 'lru'"),
        ("PYSPAC_MAX_KL", "0", "PYSPAC_MAX_KL"),
        ("PYSPAC_PREDICT", "next-layer,x", "PYSPAC_PREDICT"),
        ("PYSPAC_PREDICT", "draft-gate:cutoff=x", "PYSPAC_PREDICT: draft-gate knows no"),
        ("PYSPAC_STAGE", "2", "PYSPAC_STAGE"),
        ("PYSPAC_FILL", "yes", "give 0 or 1"),
        ("PYSPAC_EVICT", "-1", "give 0 or 1"),
        ("PYSPAC_HOST_KERNELS", "x", "give auto, spac or ggml"),
        ("PYSPAC_COPY_GB_S", "1,x", "a speed in 1e9 bytes/s"),
        ("PYSPAC_CPU_RANGE", "1-", "the cpu range cannot be"),
        ("PYSPAC_NGRAM", "0", "give a number of tokens from 1"),
        ("PYSPAC_MASKS", "x", "give a number of tokens from 1"),
    ],
)
def test_a_wrong_variable_is_refused_before_the_model_is_loaded(
    name: str, value: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServeOptions(model=TARGET, device="emulated")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(error)):
        start_server(options, LAUNCH)
    with pytest.raises(UsageError, match=re.escape(error)):
        check_variable(name, value)
    check_variable("PYSPAC_OTHER", value)


def test_a_range_of_cores_bounds_the_threads_and_goes_to_the_engine() -> None:
    core = min(os.sched_getaffinity(0))
    options = ServeOptions(model=Path("t"), cpu_range=f"{core}-{core}")
    argv = server_argv(options, LAUNCH, Path())
    assert argv[argv.index("--threads") + 1] == "1"
    assert "--threads" not in server_argv(replace(options, passed=("-t", "2")), LAUNCH, Path())
    assert server_env(options)["PYSPAC_CPU_RANGE"] == f"{core}-{core}"


@pytest.mark.parametrize(
    ("passed", "is_told"), [((), True), (("-ub", "64"), False), (("--ubatch-size", "64"), False)]
)
def test_how_many_tokens_at_once_is_the_users_word(passed: tuple[str, ...], is_told: bool) -> None:
    options = ServeOptions(model=Path("m.gguf"), passed=passed)
    argv = server_argv(options, replace(LAUNCH, n_ubatch=2048), Path("bin"))
    assert (" -ub 2048 " in " ".join(argv)) == is_told
    assert "-ub" not in server_argv(ServeOptions(model=Path("m.gguf")), LAUNCH, Path("bin")), (
        "llama.cpp's own"
    )


def test_experts_that_stay_on_disk_are_mapped_and_the_engine_knows_its_memory() -> None:
    options = ServeOptions(model=Path("m.gguf"), device="none", ram="25%")
    launch = replace(LAUNCH, cache="0", is_copied=True, ram_bytes=700 << 20)
    argv = server_argv(options, launch, Path("bin"))
    assert argv[argv.index("--lazy-mode") + 1] == "experts"
    assert argv[argv.index("--load-mode") + 1] == "none", "what is no expert is loaded"
    assert server_env(options, launch.ram_bytes)["PYSPAC_RAM"] == "734003200B"
    assert "--no-warmup" in argv, "it would run every expert"
    assert "--no-warmup" not in server_argv(replace(options, passed=("--warmup",)), launch, Path("bin"))
    assert "--lazy-mode" not in server_argv(options, replace(launch, ram_bytes=None), Path("bin"))


def test_experts_on_disk_beside_a_device() -> None:
    options = ServeOptions(model=Path("m.gguf"), device="emulated", ram="25%").on(cpu_device())
    launch = replace(LAUNCH, cache="25%", is_copied=True, ram_bytes=700 << 20)
    argv = server_argv(options, launch, Path("bin"))
    assert argv[argv.index("--spac-cache") + 1] == "25%"
    assert argv[argv.index("--lazy-mode") + 1] == "experts"
    assert server_env(options, launch.ram_bytes)["PYSPAC_RAM"] == "734003200B"


@pytest.mark.parametrize("flag", [("--api-key", "secret"), ("--api-key=secret",), ("--api_key", "secret")])
def test_keys_leave_the_command_line(flag: tuple[str, ...]) -> None:
    kept, found = take_secrets(["-m", "pyspac", "serve", *flag, "--", "-np", "2"], {})
    assert kept == ["-m", "pyspac", "serve", "--", "-np", "2"]
    assert found == {"LLAMA_API_KEY": "secret"}


def test_several_keys_hold() -> None:
    argv = ["serve", "--api-key", "b", "--", "--api-key", "c", "-hft", "t", "--hf-token", "u"]
    assert take_secrets(argv, {"LLAMA_API_KEY": "a", "HF_TOKEN": "s"}) == (
        ["serve", "--"],
        {"LLAMA_API_KEY": "a,b,c", "HF_TOKEN": "u"},
    )
    assert take_secrets(["serve", "--", "--api-key"], {}) == (["serve", "--", "--api-key"], {})


def test_a_prompt_is_no_key() -> None:
    argv = ["run", "-p", "--api-key", "-n", "3"]
    assert take_secrets(argv, {}) == (argv, {})


def test_methods_alone_open_nothing() -> None:
    options = ServeOptions(model=Path("t"), passed=("--cors-methods", "GET"))
    assert "--no-cors-credentials" in server_argv(options, LAUNCH, Path("/bin"))


@pytest.mark.parametrize(
    ("passed", "name", "left_out"),
    [
        (("--cors-origins", "https://x", "--cors-methods", "GET"), "", "--no-cors-credentials"),
        ((), "LLAMA_ARG_CORS_ORIGINS", "--no-cors-credentials"),
        (("-to", "600"), "", "--timeout"),
        ((), "LLAMA_ARG_TIMEOUT", "--timeout"),
        ((), "LLAMA_ARG_STATIC_PATH", "--path"),
    ],
)
def test_what_is_asked_for_by_name_holds(
    monkeypatch: pytest.MonkeyPatch, passed: tuple[str, ...], name: str, left_out: str
) -> None:
    if name:
        monkeypatch.setenv(name, "x")
    argv = server_argv(ServeOptions(model=Path("t"), passed=passed), LAUNCH, Path("/bin"))
    assert left_out not in argv


def test_a_given_kind_of_drafting_stays() -> None:
    options = ServeOptions(model=Path("t"), draft=Path("d"), passed=("--spec-type", "draft-eagle3"))
    argv = server_argv(options, LAUNCH, Path("/bin"))
    assert argv.count("--spec-type") == 1
    assert argv[-1] == "draft-eagle3"


def test_weights_are_pinned_for_a_real_device_only() -> None:
    options = ServeOptions(model=Path("t"))
    real = replace(LAUNCH, is_copied=True)
    assert "--load-mode" not in server_argv(options, LAUNCH, Path())
    assert "--load-mode" in server_argv(options, real, Path())
    assert server_argv(replace(options, passed=("-lm", "mmap")), real, Path()).count("--load-mode") == 0


def test_a_page_stands_in_where_the_build_has_none() -> None:
    options, without = ServeOptions(model=Path("t")), replace(LAUNCH, has_page=False)
    assert "--path" not in server_argv(options, LAUNCH, Path())
    argv = server_argv(options, without, Path())
    assert "PYSPAC_UI=1" in (Path(argv[argv.index("--path") + 1]) / "index.html").read_text()
    for given in (("--path", "mine"), ("--no-ui",)):
        argv = server_argv(replace(options, passed=given), without, Path())
        assert argv.count("--path") == given.count("--path")


def test_without_a_device() -> None:
    options = ServeOptions(model=Path("t"), device="none", host_kernels="spac")
    argv = server_argv(options, replace(LAUNCH, cache="0"), Path())
    assert argv[argv.index("--device") + 1] == "none"
    assert server_env(options) == READ_BY_FLAGS | {
        "PYSPAC_MAX_BATCH": "36", "PYSPAC_DEVICE": "none", "PYSPAC_HOST_KERNELS": "spac",
        "GLIBC_TUNABLES": HUGE_PAGES,
    }  # fmt: skip
    assert not options.has_scheduler
    assert replace(options, attach=AttachOptions(metrics_port=0)).has_scheduler
    assert replace(options, attach=AttachOptions(speculation="auto")).has_scheduler


@pytest.mark.parametrize(
    "arguments",
    [
        ("--speculation", "auto"),
        ("--speculation", "static"),
        ("--draft-max", "4"),
    ],
)
def test_draft_lengths_nobody_could_obey_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_pyspac("serve", "-m", str(TARGET), "--device", "cpu", *arguments, cache_dir=tmp_path)
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert f"{arguments[0]} {arguments[1]} has no effect, as nothing drafts" in text
    assert "-md FILE" in text
    assert "--spec-type ngram" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--spec-type", "eagle"), "one or more of llama.cpp's: draft-simple, draft-eagle3"),
        (("--spec-type", "draft-simple"), "--spec-type draft-simple needs a draft model: give one with -md"),
        (("--spec-type", "ngram-mod", "-md", str(DRAFT)), "--spec-type ngram-mod uses no draft model"),
        (("--spec-type", "draft-mtp"), "this model has no head that predicts further tokens"),
        (("--spec-type", "draft-dspark", "-md", str(DRAFT)), "draft-dspark needs a draft that was trained"),
        (
            ("--spec-type", "ngram-cache", "--draft-max", "4"),
            "always drafts 8 tokens; add",
        ),
        (("--spec-type", "none", "--speculation", "auto"), "--speculation auto has no effect"),
        (("--spec-type", "ngram-mod", "--draft-max", "0"), "--draft-max cannot be 0: give a whole number"),
        (("--spec-type", "ngram-mod", "--", "--spec-type", "ngram-mod"), "--spec-type is given twice"),
    ],
)
def test_bad_kinds_of_drafting(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run_pyspac("serve", "-m", str(TARGET), "--device", "cpu", *arguments, cache_dir=tmp_path)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("spec_type", "flags"),
    [
        ("ngram", "--spec-type ngram-simple --spec-ngram-simple-size-n 6 --spec-ngram-simple-size-m 6"),
        ("ngram-map-k4v", "--spec-type ngram-map-k4v --spec-ngram-map-k4v-size-m 6"),
        ("ngram-mod", "--spec-type ngram-mod --spec-ngram-mod-n-min 6 --spec-ngram-mod-n-max 6"),
        ("ngram-cache", "--spec-type ngram-cache"),
        ("draft-mtp", "--spec-type draft-mtp --spec-draft-n-max 6"),
        (
            "ngram-map-k,draft-mtp",
            "--spec-type ngram-map-k,draft-mtp --spec-ngram-map-k-size-m 6 --spec-draft-n-max 6",
        ),
    ],
)
def test_every_kind_of_drafting_is_given_its_length(spec_type: str, flags: str) -> None:
    attach = AttachOptions(scheduler=SchedulerConfig(n_draft_max=6), speculation="auto")
    options = ServeOptions(model=Path("t"), spec_type=spec_type, device="cpu", attach=attach)
    argv = server_argv(options, LAUNCH, Path("/bin"))
    assert " ".join(argv).startswith(f"/bin/llama-server -m t {flags} -c 512")
    assert server_env(options).get("PYSPAC_NGRAM") == ("6" if spec_type == "ngram" else None)


def test_a_drafter_after_the_dashes_keeps_its_own_lengths_unless_steered() -> None:
    passed = ("--spec-type", "ngram-mod")
    assert drafting_of(None, passed, None, None, has_draft=False) == ("static", 0)
    assert drafting_of(None, passed, "auto", None, has_draft=False) == ("auto", 8)
    assert drafting_of("ngram-mod", (), None, None, has_draft=False) == ("forecast", 8)
    assert drafting_of(None, (), None, None, has_draft=False) == ("static", 0)


@pytest.mark.parametrize(
    ("speculation", "draft_max", "chosen"),
    [
        (None, None, ("forecast", 8)),
        (None, 6, ("static", 6)),
        ("auto", 12, ("auto", 12)),
        ("static", None, ("static", 4)),
    ],
)
def test_the_estimators_longest_draft_is_the_servers(
    speculation: str | None, draft_max: int | None, chosen: tuple[str, int]
) -> None:
    """[gamma] follows --draft-max."""
    controller, n_draft_max = choose_drafting(speculation, draft_max)
    assert (controller, n_draft_max) == chosen
    assert Policy.read("spac").with_drafts(n_draft_max, ()).gamma == chosen[1]


def test_the_scheduler_process_takes_the_limit_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AttachOptions] = []
    monkeypatch.setattr(board_file, "find_board", lambda name: name)
    monkeypatch.setattr("pyspac.server.attach.run_attached", lambda _name, options: seen.append(options))
    for n_draft_max in (12, 0):
        config = SchedulerConfig(estimator="spac", n_draft_max=n_draft_max)
        argv, text = attach_argv("b"), to_json(AttachOptions(scheduler=config))
        result = CliRunner().invoke(app, argv[argv.index("attach") :], input=text)
        assert result.exit_code == 0, result.output
        assert seen[-1].scheduler == config
    logging.getLogger(log.NAME).handlers.clear()


@pytest.mark.parametrize("max_batch", [0, MAX_BATCH + 1])
def test_batches_too_wide_are_refused_before_anything_starts(max_batch: int) -> None:
    options = ServeOptions(model=TARGET, device="cpu", max_batch=max_batch)
    with pytest.raises(
        ConfigError, match=f"--max-batch cannot be {max_batch}: give a number of tokens from 1 to {MAX_BATCH}"
    ):
        plan_launch(options, lambda: False)


def test_draft_gate_needs_a_draft_model_of_the_target_s_width() -> None:
    options = ServeOptions(
        model=TARGET,
        draft=DRAFT,
        device="cpu",
        attach=AttachOptions(scheduler=SchedulerConfig(predict=("draft-gate",))),
    )
    with pytest.raises(UsageError, match=r"as wide as the target: .*demo-draft.gguf has a width of 160"):
        plan_launch(options, lambda: False)


@pytest.mark.parametrize("n_draft_max", ["-1", "256"])
def test_bad_draft_limits(tmp_path: Path, n_draft_max: str) -> None:
    done = run_pyspac(
        "serve", "-m", str(TARGET), "-md", str(DRAFT), "--draft-max", n_draft_max, cache_dir=tmp_path
    )
    assert done.returncode == 2
    assert f"--draft-max cannot be {n_draft_max}: give a whole number from 1 to 255" in done.stderr


def test_a_known_link_reaches_the_scheduler() -> None:
    assert Policy.read("link_gb_s=12.5").with_drafts(8, ()).link_gb_s == 12.5
    with pytest.raises(ConfigError, match="link_gb_s cannot be 0"):
        Policy.read("link_gb_s=0.0")


def test_a_policy_is_a_name_settings_or_a_file_of_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('estimator = "spac"\nwithout = ["evict"]\ncopy_gb_s = [20.0, 2]\n')
    policy = Policy.read(str(file))
    assert (policy.config.estimator, policy.config.without) == ("spac", {"evict"})
    assert policy.copy_gb_s == (20.0, 2)
    assert Policy.read(file.read_text()).config == policy.config
    assert Policy.read(DEFAULT_POLICY).config == SchedulerConfig()


@pytest.mark.parametrize("flag", ["-hf", "--hf-repo", "--model-url=x"])
def test_two_models_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="two models, -m a"):
        ServeOptions(model=Path("a.gguf"), passed=(flag, "b"))


def test_a_model_is_named_as_llama_server_reads_it() -> None:
    """It knows no --flag=value."""
    with pytest.raises(ConfigError, match="there is no model"):
        ServeOptions(passed=("--model-url=x",))


def test_a_model_of_llama_servers_own_choice() -> None:
    options = ServeOptions(passed=("-hf", "some/model", "--api-key", "secret"))
    assert options.passed_value("--api-key") == "secret"
    assert "-m" not in server_argv(options, LAUNCH, Path("/bin"))


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": CacheSize(text="0")},
        {"n_ctx": -1},
        {"board": "../x"},
        {"passed": ("--spac-cache=1",)},
        {"model": None},
        {"host_kernels": "fast"},
        {"cpu_range": "1-0"},
        {"cpu_range": "0-999"},
        {"passed": ("-Cr", "0-1")},
        {"passed": ("--cpu-range=0-1",)},
        {"device": "none", "cache": CacheSize(text="25%")},
        {"device": "none", "host_kernels": "ggml"},
        {"draft": Path("d"), "attach": AttachOptions(scheduler=SchedulerConfig(n_draft_max=0))},
    ],
)
def test_bad_options(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeOptions(**{"model": Path("t"), **fields})


# ---- memory


def device(free_bytes: int) -> Device:
    return Device(name="GPU0", description="", handle=1, memory_free=free_bytes, memory_total=free_bytes)


def test_needs_of_the_demo_pair() -> None:
    target, draft = read_header(TARGET), read_header(DRAFT)
    needs = device_needs.estimate_needs(target, draft, n_ctx=1000)
    geometry = read_geometry(target)
    assert needs.weights == geometry.model_bytes - geometry.experts_bytes
    assert needs.draft == sum(tensor.n_bytes for tensor in draft.tensors)
    n_head_kv, head = int(target.get("attention.head_count_kv")), int(target.get("attention.key_length"))
    assert device_needs.kv_bytes(target, 1000) == geometry.n_layer * n_head_kv * 2 * head * 1000 * 2
    assert needs.margin == AUTO_MARGIN_BYTES
    assert needs.total == needs.weights + needs.draft + needs.kv + needs.compute + needs.margin


def test_every_context_that_drafts_has_buffers() -> None:
    """A draft model's, and those of a head, whose weights and cache are among the target's."""
    target, draft = read_header(TARGET), read_header(DRAFT)
    alone, with_head, with_draft = (
        device_needs.estimate_needs(target, *given, has_head=has_head)  # type: ignore[arg-type]
        for given, has_head in (((None, 1000), False), ((None, 1000), True), ((draft, 1000), False))
    )
    assert with_head.compute == 2 * alone.compute
    assert (with_head.weights, with_head.draft, with_head.kv) == (alone.weights, 0, alone.kv)
    assert with_draft.compute - alone.compute == device_needs.compute_bytes(draft, 1000)


@pytest.mark.parametrize(
    ("free", "is_gpu", "n_slots", "n_train", "n_ctx"),
    [
        (8 * GIB, True, 1, 262_144, 86_016),  # an eighth, of 12,288 bytes a token
        (8 * GIB, True, 4, 32_768, 32_768),  # the model's own is less
        (1 << 20, True, 1, 262_144, 4096),  # never less than without memory to speak of
        (1 << 20, True, 4, 262_144, 16_384),
        (24 * GIB, False, 1, 262_144, 262_144),  # an eighth
        (20 * GIB, False, 1, 262_144, 131_072),  # half of what the model leaves
        (8 * GIB, False, 1, 262_144, 40_960),  # the model is larger than memory: a sixteenth
    ],
)
def test_a_context_is_what_memory_allows(
    monkeypatch: pytest.MonkeyPatch, free: int, is_gpu: bool, n_slots: int, n_train: int, n_ctx: int
) -> None:
    """A model of 16 GiB, 3 GiB of memory for anything else; -c says otherwise."""
    header = read_header(TARGET)
    geometry = replace(read_geometry(header), n_ctx_train=n_train, model_bytes=16 * GIB)
    monkeypatch.setattr(memory, "read_geometry", lambda _: geometry)
    monkeypatch.setattr(memory, "context_bytes", lambda *_: 12_288)
    device = Device(
        name="X", description="x", handle=1 if is_gpu else None, memory_free=free, memory_total=free
    )
    assert memory.choose_server_n_ctx(None, header, None, device, n_slots) == n_ctx
    assert memory.choose_server_n_ctx(100, header, None, device, n_slots) == 100
    assert memory.choose_server_n_ctx(0, header, None, device, n_slots) == n_train


def test_tokens_at_once_follow_from_model_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 16 GiB with 128 experts, of which a token uses 8."""
    header = read_header(TARGET)
    geometry = replace(read_geometry(header), n_expert=128, n_expert_used=8, model_bytes=16 * GIB)
    monkeypatch.setattr(at_once, "read_geometry", lambda _: geometry)
    options, gpu, cpu = ServeOptions(model=TARGET), device(8 * GIB), cpu_device(has_cache=False)

    def chosen(options: ServeOptions, where: Device, n_ctx: int = 8192, *, is_on_disk: bool = False) -> int:
        return at_once.choose_n_ubatch(options, header, n_ctx, where, is_on_disk=is_on_disk)

    assert chosen(options, gpu) == 2048, "each piece copies what is not there"
    assert chosen(options, gpu, 1500) == 1024, "no more than the context"
    assert chosen(options, device(20 * GIB)) == 512, "nothing is copied"
    assert chosen(options, device(64 * MIB)) == 512, "buffers take a share of memory"
    host = replace(options, device="none")
    monkeypatch.setattr("pyspac.engine.engine.tokens_per_expert", lambda: 0)
    assert chosen(host, cpu) == 512
    assert chosen(host, cpu, is_on_disk=True) == 2048
    monkeypatch.setattr("pyspac.engine.engine.tokens_per_expert", lambda: 64)
    assert chosen(host, cpu) == 1024, "64 for each of 128 experts, of 8 per token"
    assert chosen(replace(host, stock=True), cpu) == 512
    assert chosen(replace(host, passed=("-b", "256")), cpu) == 256, (
        "llama.cpp has no more than a batch at once"
    )
    assert chosen(replace(host, passed=("-ub", "128")), cpu, is_on_disk=True) == 128
    monkeypatch.setenv("LLAMA_ARG_UBATCH", "96")
    assert chosen(host, cpu) == 96


@pytest.mark.parametrize("size", ["0", "1", "3"])
@pytest.mark.parametrize("is_variable", [False, True])
def test_a_batch_of_too_few_tokens_is_refused(
    is_variable: bool, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With none a server would never end the first prompt; with fewer than its slots it aborts."""
    if is_variable:
        monkeypatch.setenv("LLAMA_ARG_BATCH", size)
    options = ServeOptions(model=TARGET, passed=() if is_variable else ("-b", size))
    geometry = read_geometry(read_header(TARGET))
    with pytest.raises(ConfigError, match=f"-b cannot be '{size}': give 4 or more"):
        at_once.most_at_once(options, geometry, device(8 * GIB), is_on_disk=False)


@pytest.mark.parametrize(
    ("passed", "refusal"),
    [
        (("--seed", "-1"), None),
        (("-np", "2", "-np", "-1"), None),  # llama-server warns of a flag that is given twice
        (("--reverse-prompt", "-end"), None),
        (("--temp",), 'argument "--temp": expected value'),
        (("--jinja", "--nonsense"), "invalid argument: --nonsense"),
        (("--seed", "1", "-x"), "invalid argument: -x"),
        (("-np", "1", "-np", "abc", "--jinja"), 'argument "-np": stoi'),
    ],
)
def test_flags_of_llama_server_are_parsed_by_it(passed: tuple[str, ...], refusal: str | None) -> None:
    if refusal is None:
        passed_on.check_passed(bin_dir(), passed)
    else:
        with pytest.raises(UsageError, match=re.escape("refuses what is passed on to it: ") + f".*{refusal}"):
            passed_on.check_passed(bin_dir(), passed)


def test_variables_of_llama_server_are_parsed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_THREADS", "many")
    for passed in ((), ("--seed", "1")):
        with pytest.raises(UsageError, match=r'"LLAMA_ARG_THREADS": stoi; unset LLAMA_ARG_THREADS'):
            passed_on.check_passed(bin_dir(), passed)
        passed_on.check_passed(bin_dir(), passed, {"LLAMA_ARG_THREADS": None})


def test_tokens_at_once_are_counted() -> None:
    target = read_header(TARGET)
    few, many = (device_needs.estimate_needs(target, None, 4096, n) for n in (512, 2048))
    assert many.compute == 4 * few.compute
    assert device_needs.context_bytes(target, 2048) > device_needs.context_bytes(target)


def test_a_dense_model_has_no_experts_to_read_at_once() -> None:
    assert prompt_piece.wanted_piece(read_geometry(read_header(DRAFT)), "device") == 512


@pytest.mark.parametrize(
    ("file", "passed", "alias"),
    [
        ("/models/Qwen3-30B.gguf", (), ["--alias", "Qwen3-30B"]),
        ("/models/big-00001-of-00003.gguf", (), ["--alias", "big"]),
        ("/models/a,b.gguf", (), ["--alias", "a_b"]),
        ("/models/m.gguf", ("--alias", "mine"), []),
        ("/models/m.gguf", ("-a", "mine"), []),
    ],
)
def test_clients_see_the_name_of_the_file(file: str, passed: tuple[str, ...], alias: list[str]) -> None:
    argv = server_argv(ServeOptions(model=Path(file), passed=passed), LAUNCH, Path("bin"))
    own = argv[: len(argv) - len(passed)]
    assert own[own.index("--metrics") + 1 :][: len(alias)] == alias
    assert ("--alias" in own) == bool(alias)


@pytest.mark.parametrize(
    ("path", "n_ctx", "reserved"),
    [(TARGET, 512, 5.51), (TARGET, 1024, 6.01), (DRAFT, 512, 4.07), (DRAFT, 1024, 4.57)],
)
def test_the_estimate_of_buffers_is_above_what_llama_cpp_reserves(
    path: Path, n_ctx: int, reserved: float
) -> None:
    """`reserved`: MiB that it logged on the CPU, for 512 tokens at once."""
    estimate = device_needs.compute_bytes(read_header(path), n_ctx) / MIB
    assert reserved < estimate < 1.6 * reserved


@pytest.mark.parametrize("passed", [("-np", "5"), ("--rope-scaling", "yarn"), ("--override-kv", "a=int:1")])
def test_a_context_longer_than_the_slots_can_use(passed: tuple[str, str]) -> None:
    """The demo's is 1024 tokens; more slots, or a stretched context, can use more than four times that."""
    geometry = read_geometry(read_header(TARGET))
    memory.check_n_ctx(ServeOptions(model=TARGET, n_ctx=4096), geometry)
    memory.check_n_ctx(ServeOptions(model=TARGET, n_ctx=4097, passed=passed), geometry)
    with pytest.raises(ConfigError, match="give at most 4096: 4 slots with 1024 tokens each"):
        memory.check_n_ctx(ServeOptions(model=TARGET, n_ctx=4097), geometry)


def test_latent_attention_keeps_one_row_per_token() -> None:
    header = SimpleNamespace(
        get=lambda key, default=None: {
            "block_count": 2, "attention.kv_lora_rank": 512, "rope.dimension_count": 64,
        }.get(key, default)
    )  # fmt: skip
    assert device_needs.kv_bytes(header, 10) == 2 * 10 * 2 * (512 + 64)  # type: ignore[arg-type]


def test_the_cache_takes_what_is_left() -> None:
    geometry = read_geometry(read_header(TARGET))
    needs = device_needs.Needs(weights=10 * MIB, draft=5 * MIB, kv=MIB)
    rich, poor = device(needs.total + 3 * MIB), device(needs.total)
    assert memory.choose_cache("auto", geometry, needs, rich) == "3"
    assert memory.choose_cache("25%", geometry, needs, poor) == "25%"
    assert memory.why_tight("25%", geometry, needs, poor) is not None
    assert memory.why_tight("1", geometry, needs, rich) is None
    with pytest.raises(ConfigError, match="weights 10, draft 5, kv 1, compute 0, margin 768"):
        memory.choose_cache("auto", geometry, needs, poor)


def test_the_device_is_asked_in_a_process_of_its_own() -> None:
    assert device_probe.probe_device("auto", None, lambda: False).memory_free > 0
    with pytest.raises(ConfigError, match="auto, none or emulated"):
        device_probe.probe_device("no-such-device", None, lambda: False)


def test_a_server_that_hangs_behind_its_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(says(7, 0, 1)) as (endpoint, received):
        with pytest.raises(StoppedError):
            device_probe.probe_device("auto", endpoint, lambda: len(received) > 2 * GREETING_BYTES)
        monkeypatch.setattr(device_probe, "_RPC_TIMEOUT_S", 3.0)
        with pytest.raises(NoAnswerError, match=f"{endpoint} has answered the greeting and then nothing"):
            device_probe.probe_device("auto", endpoint, lambda: False)


# ---- ports, names, children


@pytest.mark.parametrize(
    ("given", "host", "metrics_host"),
    [
        (True, HOST, HOST),
        (True, "0.0.0.0", HOST),
        (True, HOST, "0.0.0.0"),
        (True, "localhost", HOST),
        (True, HOST, "localhost"),
        (True, "0", HOST),
        (False, HOST, HOST),
    ],
)
def test_metrics_have_a_port_of_their_own(
    monkeypatch: pytest.MonkeyPatch, given: bool, host: str, metrics_host: str
) -> None:
    port = free_port()
    if not given:
        monkeypatch.setattr(plan, "choose_port", lambda *_: port)  # the default one
    attach = AttachOptions(metrics_port=port, metrics_host=metrics_host)
    options = ServeOptions(model=TARGET, host=host, port=port if given else None, attach=attach)
    with pytest.raises(ConfigError, match=f"--metrics-port cannot be {port}.*another port"):
        plan_launch(options, lambda: False)


@pytest.mark.parametrize("flag", ["-t", "-tb", "-td", "-tbd"])
def test_threads_that_no_context_takes(flag: str) -> None:
    """llama-server aborts while it loads the model."""
    options = ServeOptions(model=TARGET, passed=(flag, "1000000"))
    with pytest.raises(ConfigError, match=f"^{flag} cannot be 1000000: give a number of threads from"):
        plan_launch(options, lambda: False)


def test_ports() -> None:
    with closing(socket.create_server((HOST, 0))) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            choose_port(HOST, taken)
        with pytest.raises(ConfigError, match=f"port {taken} on {HOST} is in use: give another --port, or 0"):
            choose_port(HOST, None, default=taken)
        assert choose_port(HOST, 0) != taken
        assert not is_healthy(HOST, choose_port(HOST, 0))
    with pytest.raises(ConfigError):
        choose_port("203.0.113.1", None)  # no address of this machine


def test_somebody_else_on_the_port_is_not_healthy() -> None:
    with closing(socket.create_server((HOST, 0))) as listener:
        assert get_json(HOST, listener.getsockname()[1], "/health") == (0, None)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "-a", "a b", "ä", "a" * 101])
def test_bad_board_names(name: str) -> None:
    with pytest.raises(ConfigError):
        board_file.check_name(name)


def test_backoff_doubles_and_forgets() -> None:
    backoff = Backoff(first_s=0.0, longest_s=3.0)
    assert [backoff.after(1) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 3.0]
    assert backoff.after(60) == 0.0


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    said = tmp_path / "said"
    with said.open("wb") as stdout:
        child = Child("sleeper", [sys.executable, "-c", script], stdout=stdout)
    wait_for("it to ignore SIGTERM", lambda: said.stat().st_size > 0)
    assert child.exit_code() is None
    assert not child.stop(0.3)
    assert child.end_text() == f"sleeper (process {child.pid}) was killed by SIGKILL"


# ---- pacing


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now_s += seconds


def test_pacer_by_hand() -> None:
    """News: the shortest period. Nothing new: longer and longer, up to 20 ms. Of 1 ms: 19 ms of rest."""
    board, fake = small_board(), FakeTime()
    pacer = Pacer(board, 0.05, sleep=fake.sleep, clock=lambda: fake.now_s)
    for _ in range(30):
        assert not pacer.poll()
    assert fake.naps[0] < 0.002
    assert fake.naps == sorted(fake.naps)
    assert fake.naps[-1] == IDLE_POLL_S
    board.record_step(StepRecord(n_tokens=1))
    assert pacer.poll()
    pacer.rest_after(0.001)
    board.counters["n_forward"] += 1
    assert pacer.poll()
    assert fake.naps[-1] == pytest.approx(0.019)


def test_pacer_looks_ahead_while_it_rests() -> None:
    """A look cannot wait, and has half of the share: too many are left out, and steps come all the same."""
    board, fake = small_board(), FakeTime()
    pacer = Pacer(board, 0.05, sleep=fake.sleep, clock=lambda: fake.now_s)
    pacer.looks_ahead = True
    board.record_step(StepRecord(n_tokens=1))
    assert pacer.poll()
    pacer.rest_after(0.001)  # 39 ms
    board.n_looks[0] += np.uint64(1)
    assert not pacer.has_look()  # is being written
    board.n_looks[0] += np.uint64(1)
    assert pacer.has_look()
    assert not pacer.has_look()  # told once
    pacer.rest_longer(0.010)  # 390 ms: more than it may owe
    board.n_looks[0] += np.uint64(2)
    assert not pacer.has_look()
    board.counters["n_forward"] += 1
    start_s = fake.now_s
    while not pacer.poll():
        assert fake.naps[-1] < 0.002
    assert fake.now_s - start_s == pytest.approx(0.039, abs=0.004)


def test_waiting_for_news_is_cheap() -> None:
    """An idle scheduler costs under 2 % of a core."""
    pacer, cpu_s, start_s = Pacer(small_board(), 0.05), time.process_time(), time.monotonic()
    while time.monotonic() - start_s < 1.0:
        pacer.poll()
    assert time.process_time() - cpu_s < 0.02


def test_a_busy_machine_is_no_reason_to_rest_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's cost is its CPU time: one that waits for a core is no dearer, and the next no later."""
    attachment = Attachment(None, small_board(), AttachOptions(warm_start=False))
    monkeypatch.setattr(attachment.scheduler, "step", lambda: time.sleep(0.3))
    assert attachment._step() < 0.15
    monkeypatch.setattr(attachment.board, "read_upcoming", lambda: time.sleep(0.3))
    assert attachment._look_ahead() < 0.15


def test_no_thread_for_a_scheduler_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with (
        pytest.raises(NoProcessError, match=r"^the scheduler's thread cannot be started, .* raise the limit"),
        scheduling(small_board(), AttachOptions(warm_start=False)),
    ):
        pass


def test_totals() -> None:
    board, totals = small_board(), StepTotals()
    drain = ActivationDrain(board)
    board.record_step(StepRecord(n_draft=3, n_accepted=2, draft_us=10, verify_us=20))
    board.record_step(StepRecord(n_draft=3, n_accepted=0, draft_us=10, verify_us=20))
    totals.add(drain.drain().steps)
    assert (totals.n_steps, totals.n_tokens, totals.n_draft, totals.verify_us) == (2, 4, 6, 40)


# ---- metrics and log


def test_metrics_of_a_board() -> None:
    board = small_board()
    board.counters["n_forward"] = 7
    board.counters["n_hit_rows"] = 30
    board.residency[1, :2] = Residency.RESIDENT
    scheduler = Scheduler(board)
    assert scheduler.fallback is not None
    scheduler.fallback.gain = 0.25
    attachment = SimpleNamespace(
        name="b", board=board, scheduler=scheduler, read_ahead=None,
        totals=StepTotals(n_steps=2, n_accepted=3),
    )  # fmt: skip
    with serve_metrics(attachment, HOST, 0) as port:  # type: ignore[arg-type]
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
        with pytest.raises(ConfigError, match="--metrics-port"), serve_metrics(attachment, HOST, port):  # type: ignore[arg-type]
            pass
    assert "pyspac_disk" not in text
    for line in (
        "pyspac_forwards_total 7.0",
        'pyspac_activations_total{where="device"} 30.0',
        'pyspac_resident_experts{layer="1"} 2.0',
        "pyspac_generated_tokens_total 5.0",
        "pyspac_slots 3.0",
        "pyspac_byte_budget +Inf",
        "pyspac_copies_chosen 1.0",
        "pyspac_copies_gain 0.25",
        "pyspac_copies_trials_total 0.0",
    ):
        assert line in text.splitlines()


def test_metrics_of_whole_layers() -> None:
    board = LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=4, n_expert_used=2, n_slots=5))
    scheduler = Scheduler(board)
    attachment = SimpleNamespace(
        name="b", board=board, scheduler=scheduler, totals=StepTotals(), read_ahead=None
    )
    with serve_metrics(attachment, HOST, 0) as port:  # type: ignore[arg-type]
        board.whole[1] = LayerMode.WHOLE
        scheduler.step()
        scheduler.layers.gain = 0.5
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
    assert "pyspac_whole_layers 1.0" in lines
    assert "pyspac_whole_predicted_gain 0.5" in lines


def test_metrics_of_experts_on_disk() -> None:
    board = small_board()
    for name, n in (
        ("n_slots", 9), ("n_resident", 8), ("n_hit", 60), ("n_miss", 20), ("n_ahead", 4), ("n_reads", 72),
        ("read_bytes", 4096), ("read_us", 2_000_000), ("busy_us", 500_000), ("wait_us", 250_000),
        ("n_to_device_read", 3),
    ):  # fmt: skip
        board.tier[name] = n
    attachment = SimpleNamespace(
        name="b", board=board, scheduler=Scheduler(board), read_ahead=None, totals=StepTotals()
    )
    with (
        serve_metrics(attachment, HOST, 0) as port,  # type: ignore[arg-type]
        urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response,
    ):
        lines = response.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(("pyspac_disk_", "pyspac_memory_")))
    assert {name: float(value) for name, value in found.items() if "_created" not in name} == {
        "pyspac_memory_slots": 9, "pyspac_memory_resident_experts": 8, "pyspac_memory_hits_total": 60,
        "pyspac_memory_misses_total": 20, "pyspac_disk_reads_ahead_total": 4, "pyspac_disk_reads_total": 72,
        "pyspac_disk_read_bytes_total": 4096, "pyspac_disk_read_seconds_total": 2.0,
        "pyspac_disk_busy_seconds_total": 0.5, "pyspac_disk_wait_seconds_total": 0.25,
        "pyspac_disk_device_copies_total": 3,
    }  # fmt: skip


def predictor_metrics(board: LocalBoard, *names: str) -> dict[str, float]:
    """What a scheduler with these predictors shows of `pyspac_predictor_*`."""
    scheduler = Scheduler(board, SchedulerConfig(predict=names))
    attachment = SimpleNamespace(
        name="b", board=board, scheduler=scheduler, read_ahead=None, totals=StepTotals()
    )
    with (
        serve_metrics(attachment, HOST, 0) as port,  # type: ignore[arg-type]
        urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response,
    ):
        lines = response.read().decode().splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if line.startswith("pyspac_predictor_")]
    return {name: float(value) for name, value in rows if "_created" not in name}


def test_metrics_of_every_predictor() -> None:
    board = small_board()
    assert predictor_metrics(board) == {}
    row = board.ahead[0]
    row["n_inputs"], row["us"], row["n_chosen"], row["n_predicted"], row["n_hit"] = 10, 40, 20, 25, 15
    row["n_cut"], row["n_copied"], row["n_used"] = 3, 5, 4
    asked = {
        'pyspac_predictor_recall{predictor="NAME"}': 0.75,
        'pyspac_predictor_precision{predictor="NAME"}': 0.6,
        'pyspac_predictor_seconds_total{predictor="NAME"}': 4e-5,
        'pyspac_predictor_refused_total{predictor="NAME"}': 3,
        'pyspac_predictor_copies_total{predictor="NAME"}': 5,
        'pyspac_predictor_copies_used_total{predictor="NAME"}': 4,
    }
    # a scheduler that was attached by hand knows no distance
    for names, name in (((), "next-layer"), (("next-layer-3",), "next-layer-3")):
        found = predictor_metrics(board, *names)
        assert found == pytest.approx({metric.replace("NAME", name): n for metric, n in asked.items()})
    both = predictor_metrics(board, "token", "draft-gate")
    shown = {metric.partition('"')[2][:-2] for metric in both}
    assert shown == {"token", "next-layer", "draft-gate"}
    assert both['pyspac_predictor_tokens_total{predictor="token"}'] == 0
    assert 'pyspac_predictor_recall{predictor="draft-gate"}' not in both  # nothing was predicted yet


@pytest.mark.parametrize("command", ["serve", "attach", "top"])
def test_every_option_has_help(command: str) -> None:
    group: Any = typer.main.get_command(app)
    assert all(param.help for param in group.commands[command].params)
    assert group.commands[command].help


def test_log_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("serve", as_json=True)
    log.warning("it ended", event="died", pid=3)
    line = json.loads(capsys.readouterr().out)
    assert line["message"] == "it ended"
    assert (line["level"], line["source"], line["event"], line["pid"]) == ("warning", "serve", "died", 3)
    log.set_up("serve", as_json=False)
    log.event("it began", event="began")
    assert capsys.readouterr().err == "pyspac serve: it began\n"
    logging.getLogger(log.NAME).handlers.clear()
