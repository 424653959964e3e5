"""Experts that stay on disk (`--ram`): the same bits as in memory, and errors that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from greedy_text import greedy_text
from typer.testing import CliRunner

from pyspac._native import lib_dir
from pyspac.cli import app
from pyspac.engine.ahead import ahead_dict
from pyspac.engine.board_figures import experts_dict
from pyspac.engine.devices import choose_device
from pyspac.engine.engine import has_kernels
from pyspac.engine.tier import read_tier, tier_dict
from pyspac.errors import PyspacError, UsageError
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.forward.runner import Runner
from pyspac.model.device_needs import estimate_needs, kv_bytes
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import read_header
from pyspac.model.memory_tier import (
    asked_bytes,
    given_ram,
    host_bytes,
    least_bytes,
    n_slots,
    pool_bytes,
)
from pyspac.scheduler.config import SchedulerConfig
from pyspac.units import MIB

DEMO = Path(__file__).resolve().parents[2] / "pyspac" / "models" / "demo-moe.gguf"
PROMPT = "def read_header(path):\n    with open(path) as file:\n"
WIDTHS = (1, 2, 5, 9, 16)
N_PROMPT = 40


NEXT_LAYER = SchedulerConfig(n_draft_max=0, predict=("next-layer",))


def options(model: Path, ram: str | None) -> ForwardOptions:
    return ForwardOptions(model=model, device="none", ram=ram, n_threads=2, n_ctx=512)


def tier_of(runner: Runner) -> dict[str, Any] | None:
    assert runner.split is not None
    return tier_dict(read_tier(runner.split.engine.board))


def run_json(*arguments: object) -> dict[str, Any]:
    """`pyspac run --json` of the demo's model, without a device."""
    argv = ["run", "-m", str(DEMO), "-p", PROMPT, "-dev", "none", "--temp", "0", "--json", "-"]
    result = CliRunner().invoke(app, [*argv, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def logits(runner: Runner, n_vocab: int, seed: int) -> list[np.ndarray]:
    """Of a prompt, and of batches of all widths, some of them taken back."""
    rng = np.random.default_rng(seed)
    context, found = runner.context, []
    for width in (N_PROMPT, *(int(rng.choice(WIDTHS)) for _ in range(25))):
        n_past = context.n_past
        found.append(context.decode(rng.integers(0, n_vocab, width).tolist(), 1).copy())
        if rng.random() < 0.3:
            context.rollback(n_past + int(rng.integers(0, width)))
    return found


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("qwen3moe", [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.Q8_0, Type.Q8_0, Type.Q8_0)]),
        ("gpt-oss", [(Type.MXFP4, Type.MXFP4, Type.MXFP4)]),
        ("deepseek2-fused", [(Type.Q5_K, Type.Q5_K, Type.Q5_K)]),
        ("qwen3moe", [(Type.IQ2_XXS, Type.IQ3_S, Type.Q2_K), (Type.IQ1_M, Type.IQ2_S, Type.TQ1_0)]),
    ],
)
def test_same_bits_as_in_memory(tmp_path: Path, name: str, types: Sequence[models.ExpertTypes]) -> None:
    """Through a pool of half of the experts, so that they come and go."""
    if types[0][0] == Type.IQ2_XXS and not has_kernels("IQ2_XXS"):
        pytest.skip("ARM's kernels lack it")
    path = models.write_model(tmp_path / "model.gguf", name, types)
    with Runner(options(path, None)) as runner:
        expected = logits(runner, models.N_VOCAB, 3)
    with Runner(options(path, ram_of(path, 0.6))) as runner:
        for found, wanted in zip(logits(runner, models.N_VOCAB, 3), expected, strict=True):
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
        tier = tier_of(runner)
    assert tier is not None
    assert tier["n_miss"] > tier["n_slots"], "experts had to leave"
    assert tier["n_hit"] > 0


MIXED = [(Type.F32, Type.Q4_K, Type.F32), (Type.Q8_0, Type.Q8_0, Type.Q8_0), (Type.F32,) * 3]


@pytest.mark.parametrize("device", ["none", "emulated"])
def test_types_that_ggmls_kernels_compute(tmp_path: Path, device: str) -> None:
    """Held in the pool like all others: nothing stays mapped, the bits do not depend on what it holds, and
    they are llama.cpp's but for rounding."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe", MIXED)
    geometry = read_geometry(read_header(path))
    much, little = geometry.experts_bytes - 1, least_bytes(geometry, has_device=True) * 1.2
    wanted = replace(options(path, f"{much}B"), device=device)
    with Runner(replace(options(path, None), device=device, stock=True)) as runner:
        stock = logits(runner, models.N_VOCAB, 3)
    with Runner(wanted) as runner:
        expected = logits(runner, models.N_VOCAB, 3)
    with Runner(replace(wanted, ram=f"{int(little)}B")) as runner:
        found = logits(runner, models.N_VOCAB, 3)
        tier = tier_of(runner)
        assert runner.split is not None
        declined = runner.split.engine.declined()
    assert tier is not None
    assert tier["n_miss"] > tier["n_slots"], "experts had to leave"
    assert declined == {}
    for mine, same in zip(found, expected, strict=True):
        assert np.array_equal(mine.view(np.uint32), same.view(np.uint32))
    alike = [np.corrcoef(mine.ravel(), other.ravel())[0, 1] for mine, other in zip(found, stock, strict=True)]
    assert np.median(alike) > 0.999, "a rounding that changes a router's choice shows in few of them"


@pytest.mark.parametrize("predict", [(), ("next-layer",)])
@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("qwen3moe", [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.Q8_0, Type.Q8_0, Type.Q8_0)]),
        ("gpt-oss", [(Type.MXFP4, Type.MXFP4, Type.MXFP4)]),
    ],
)
def test_same_bits_beside_a_device(
    tmp_path: Path, name: str, types: Sequence[models.ExpertTypes], predict: tuple[str, ...]
) -> None:
    """Experts on disk, in memory and on the device, which come and go; a prompt is wider than a split."""
    path = models.write_model(tmp_path / "model.gguf", name, types)
    beside = replace(
        options(path, None),
        device="emulated",
        cache=CacheSize(text="25%"),
        host_kernels="spac",
        scheduler=SchedulerConfig(n_draft_max=0, predict=predict),
    )
    with Runner(replace(beside, max_batch=64)) as runner:  # splits the prompt, too: the same kernels
        expected = logits(runner, models.N_VOCAB, 3)
    with Runner(replace(beside, ram=ram_of(path, 0.5))) as runner:
        for found, wanted in zip(logits(runner, models.N_VOCAB, 3), expected, strict=True):
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
        tier = tier_of(runner)
        assert runner.split is not None
        experts = experts_dict(runner.split.engine.board)
    assert tier is not None
    assert tier["n_miss"] > tier["n_slots"], "experts had to leave"
    assert experts["n_hit"] > 0, "the device computed some"
    assert tier["n_to_device"] >= tier["n_to_device_read"]


def test_same_bits_with_experts_read_ahead(tmp_path: Path) -> None:
    """`next-layer` without a device: what it names is read before the layer's own router asks."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe", [(Type.Q8_0, Type.Q8_0, Type.Q8_0)])
    with Runner(options(path, None)) as runner:
        expected = logits(runner, models.N_VOCAB, 3)
    ahead = replace(options(path, ram_of(path, 0.6)), scheduler=NEXT_LAYER)
    with Runner(ahead) as runner:
        for found, wanted in zip(logits(runner, models.N_VOCAB, 3), expected, strict=True):
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))
        assert runner.split is not None
        said = ahead_dict(runner.split.engine.board, "next-layer")
        tier = tier_of(runner)
    assert tier is not None
    assert said["n_inputs"] > 0
    assert said["recall"] is None or 0.0 <= said["recall"] <= 1.0  # None: each guess came too late
    assert said["n_refused"] == 0
    assert 0 <= said["n_queued"] <= tier["n_ahead"]


def test_the_same_text_with_token_and_experts_read_ahead() -> None:
    """The routing log teaches, the loads of a decision are read; a short text may end before that."""
    plain, ahead = (run_json("--ram", 6, "-n", 400, *more) for more in ((), ("--predict", "token")))
    assert plain["token_ids"] == ahead["token_ids"]
    (said,) = ahead["predictors"]
    assert said["name"] == "token"
    assert said["n_tokens"] > 0
    assert said["n_queued"] > 0
    assert ahead["tier"]["n_ahead"] > 0


def test_the_same_text_with_the_draft_models_inputs() -> None:
    """`draft-gate` with the model as its own draft model, which names what it will use."""
    drafts = ("--ram", 6, "-n", 40, "-md", DEMO, "--draft-max", 3)
    plain, gate = (run_json(*drafts, *more) for more in ((), ("--predict", "draft-gate")))
    assert plain["token_ids"] == gate["token_ids"]
    (said,) = gate["predictors"]
    assert said["name"] == "draft-gate"
    assert said["n_inputs"] > 0
    assert said["recall"] > 0.5


@pytest.mark.parametrize("name", ["next-layer", "token"])
def test_the_table_tells_of_experts_read_ahead(name: str) -> None:
    argv = ["run", "-m", str(DEMO), "-p", PROMPT, "-n", "24", "-dev", "none", "--ram", "6"]
    result = CliRunner().invoke(app, [*argv, "--predict", name])
    assert result.exit_code == 0, result.output
    # what reads by tokens is a thread of this process, which a busy machine may leave no time
    assert "experts read for" in result.output or (name == "token" and "predicted by token" in result.output)


def test_the_table_tells_of_memory_beside_a_device() -> None:
    argv = [
        "run",
        "-m",
        str(DEMO),
        "-p",
        PROMPT,
        "-n",
        "8",
        "-dev",
        "emulated",
        "--cache",
        "25%",
        "--ram",
        "6",
    ]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    assert "experts that were copied" in result.output


def test_a_predictor_where_all_fits_is_silent() -> None:
    with Runner(replace(options(DEMO, "100%"), scheduler=NEXT_LAYER)) as runner:
        greedy_text(runner.context, PROMPT, 4)
        assert tier_of(runner) is None
        assert runner.split is not None
        assert ahead_dict(runner.split.engine.board, "next-layer")["n_inputs"] == 0


def ram_of(path: Path, share: float) -> str:
    """A share of the experts' bytes, and a little for the disk's blocks: small experts need it."""
    geometry = read_geometry(read_header(path))
    n_blocks = 6 * geometry.n_experts_total
    return f"{int(share * (geometry.experts_bytes + n_blocks * 4096))}B"


def test_demo_model_in_two_files(tmp_path: Path) -> None:
    """The same text, from a model that is split over files, and the figures of the tier."""
    split = lib_dir() / "llama-gguf-split"
    command = [split, "--split", "--split-max-tensors", "40", DEMO, tmp_path / "demo"]
    subprocess.run(command, check=True, capture_output=True)
    first = min(tmp_path.glob("demo-*.gguf"))
    texts = []
    for model, ram in ((DEMO, None), (first, "6")):
        with Runner(options(model, ram)) as runner:
            texts.append(greedy_text(runner.context, PROMPT, 40))
            tier = tier_of(runner)
    assert texts[0] == texts[1]
    assert tier is not None
    assert 0 < tier["n_resident"] <= tier["n_slots"]
    assert tier["pool_bytes"] <= 6 * MIB
    assert 0.0 < tier["hit_share"] < 1.0
    assert tier["read_bytes"] > 0


def test_all_that_fits_is_loaded() -> None:
    """With as much memory as all experts take, nothing is read later."""
    with Runner(options(DEMO, "100%")) as runner:
        greedy_text(runner.context, PROMPT, 4)
        assert tier_of(runner) is None


def test_a_predictor_has_no_effect_where_all_fits_and_that_is_said() -> None:
    argv = ["run", "-m", str(DEMO), "-p", "x", "-n", "2", "-dev", "none", "--ram", "100%"]
    result = CliRunner().invoke(app, [*argv, "--predict", "next-layer"])
    assert result.exit_code == 0, result.output
    assert "--predict next-layer has no effect" in " ".join(result.stderr.split())


def test_a_model_larger_than_memory_may_be_read_ahead_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier comes by itself, so `--predict next-layer` needs no `--ram`."""
    geometry = read_geometry(read_header(DEMO))
    free = geometry.model_bytes - geometry.experts_bytes // 4
    monkeypatch.setattr("pyspac.model.memory_tier.free_memory", lambda: free)
    with Runner(replace(options(DEMO, None), n_ctx=128, scheduler=NEXT_LAYER)) as runner:
        greedy_text(runner.context, PROMPT, 4)
        assert tier_of(runner) is not None
        assert runner.split is not None
        assert ahead_dict(runner.split.engine.board, "next-layer")["n_inputs"] > 0


def test_what_was_asked_for_need_not_be_free() -> None:
    """`inspect` foresees other machines; auto is this one's."""
    geometry = read_geometry(read_header(DEMO))
    assert asked_bytes("8G", geometry, free_bytes=0) == 8 << 30
    assert asked_bytes("25%", geometry, free_bytes=0) == geometry.experts_bytes // 4
    assert asked_bytes("auto", geometry, free_bytes=0) == 0
    assert asked_bytes("auto", geometry, free_bytes=1 << 40) == geometry.experts_bytes


def test_auto_is_what_is_free() -> None:
    geometry = read_geometry(read_header(DEMO))
    others = geometry.model_bytes - geometry.experts_bytes
    assert pool_bytes(None, geometry, free_bytes=2 * geometry.model_bytes) is None, "it fits"
    assert pool_bytes("auto", geometry, free_bytes=100 * geometry.model_bytes) is None
    for free in (geometry.model_bytes, others + geometry.experts_bytes * 2 // 3):
        found = pool_bytes(None, geometry, free_bytes=free)
        assert found is not None
        assert 0 < found < min(geometry.experts_bytes, free - others)
    with pytest.raises(UsageError, match="smaller quantisation"):
        pool_bytes("auto", geometry, free_bytes=others // 2)


@pytest.mark.parametrize("text", ["6", "6M", "6MiB", "6mb", "0.005859375G", "0.005859375GiB"])
def test_sizes(text: str) -> None:
    geometry = read_geometry(read_header(DEMO))
    assert pool_bytes(text, geometry, free_bytes=100 * MIB) == 6 * MIB


def test_a_size_reaches_the_engine_as_it_was_given() -> None:
    geometry = read_geometry(read_header(DEMO))
    for text, n_bytes in (("2.9", 3040870), ("6.5", 6815744), ("6", 6291456)):
        assert pool_bytes(text, geometry, free_bytes=100 * MIB) == n_bytes
    assert pool_bytes("auto", geometry, free_bytes=100 * geometry.model_bytes) is None


@pytest.mark.parametrize("device", ["none", "emulated"])
@pytest.mark.parametrize("ram", ["3", "4.7", "50%"])
def test_what_is_foreseen_is_what_the_engine_holds(device: str, ram: str) -> None:
    geometry = read_geometry(read_header(DEMO))
    has_device = device == "emulated"
    with Runner(replace(options(DEMO, ram), device=device)) as runner:
        tier = tier_of(runner)
    assert tier is not None
    assert tier["n_slots"] == n_slots(geometry, asked_bytes(ram, geometry), has_device=has_device)


def test_the_least_is_the_engines(tmp_path: Path) -> None:
    """With it a model loads; with a byte less it is refused, with the number."""
    geometry = read_geometry(read_header(DEMO))
    for device in ("none", "emulated"):
        least = least_bytes(geometry, has_device=device == "emulated")
        with Runner(replace(options(DEMO, f"{least}B"), device=device)) as runner:
            greedy_text(runner.context, "x", 4)
        with pytest.raises(UsageError, match=f"give {-(-least // MIB)} MiB at least.* 8G is 8 GiB"):
            Runner(replace(options(DEMO, f"{least - 1}B"), device=device))


def test_the_environment_speaks_where_the_option_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPAC_RAM", "6M")
    assert given_ram(None) == "6M"
    assert given_ram("25%") == "25%"
    assert given_ram(None, is_stock=True) is None
    argv = ["run", "-m", str(DEMO), "-p", "x", "-n", "2", "-dev", "none", "--json", "-"]
    for more, n_slots_least in (([], 1), (["--ram", "100%"], 0)):
        result = CliRunner().invoke(app, [*argv, *more])
        assert result.exit_code == 0, result.output
        assert bool(json.loads(result.stdout)["tier"]) == bool(n_slots_least)
    monkeypatch.setenv("PYSPAC_RAM", "")
    assert given_ram(None) is None


def test_more_than_is_free() -> None:
    geometry = read_geometry(read_header(DEMO))
    with pytest.raises(UsageError, match=r"--ram 8: 9 MiB of memory are free.* or less"):
        pool_bytes("8", geometry, free_bytes=9 * MIB)


def test_more_than_all_experts_has_to_fit_as_well() -> None:
    """Else the whole model would be mapped, which is what --ram is to prevent."""
    geometry = read_geometry(read_header(DEMO))
    free = geometry.model_bytes // 2
    for text in ("100%", "200G"):
        with pytest.raises(UsageError, match="or less"):
            pool_bytes(text, geometry, free_bytes=free)
        assert pool_bytes(text, geometry, free_bytes=2 * geometry.model_bytes) is None


def test_contexts_are_not_the_pools() -> None:
    """Keys and values, buffers and a draft model are in memory too, without a device."""
    header, draft = read_header(DEMO), read_header(DEMO.with_name("demo-draft.gguf"))
    geometry, device = read_geometry(header), choose_device("none")
    few, many = (host_bytes(geometry, device, None, estimate_needs(header, None, n)) for n in (64, 1024))
    others = geometry.model_bytes - geometry.experts_bytes
    assert others < few < many
    assert many - few > kv_bytes(header, 1024) - kv_bytes(header, 64)
    assert (
        host_bytes(geometry, device, None, estimate_needs(header, draft, 64)) - few
        > draft.path.stat().st_size / 2
    )
    free = int((geometry.experts_bytes + few + MIB) / 0.9)  # less a margin of a tenth
    assert pool_bytes(None, geometry, free_bytes=free, others=few) is None
    assert pool_bytes(None, geometry, free_bytes=free, others=few + 3 * MIB) is not None
    assert pool_bytes(None, geometry, free_bytes=few, others=few) is None, "not a layer of them"


def test_models_without_experts_or_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a dense model has no experts"):
        Runner(options(DEMO.with_name("demo-draft.gguf"), "5"))
    monkeypatch.setattr("pyspac.model.memory_tier._has_kernels", lambda: False)
    with pytest.raises(UsageError, match="no kernels for this processor"):
        Runner(options(DEMO, "90%"))


def test_too_little() -> None:
    with pytest.raises(UsageError, match=r"give [0-9]+ MiB at least"):
        Runner(options(DEMO, "1"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ram", "0"], "holds nothing"),
        (["--ram", "much"], "--ram much is no size"),
        (["--ram", "-5"], "is no size"),
        (["--ram", "150%"], "is no size"),
        (["--ram", "25%", "--stock"], "--stock"),
        (["--ram", "25%", "--device", "emulated", "--host-kernels", "ggml"], "engine's own kernels"),
        (["--ram", "1"], "at least"),
        (["--predict", "token"], "--predict token needs a device, or experts on disk"),
        (["--predict", "draft-gate"], "--predict draft-gate needs a draft model as wide"),
        (["--predict", "next-layer"], "--predict next-layer needs a device, or experts on disk"),
    ],
)
def test_bad_input(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["run", "-m", str(DEMO), "-p", "x", "-dev", "none", *arguments])
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("device", ["none", "emulated"])
def test_file_that_gets_shorter(tmp_path: Path, device: str) -> None:
    """A clear error, no signal and no text; once it is whole again the next one works."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(DEMO, path)
    size = path.stat().st_size
    with Runner(replace(options(path, "6"), device=device, host_kernels="spac")) as runner:
        expected = greedy_text(runner.context, PROMPT, 16)
        runner.context.clear()
        os.truncate(path, size // 3)
        with pytest.raises(PyspacError, match="the file has become shorter"):
            greedy_text(runner.context, "something else entirely: 1, 2, 3", 16)
        runner.context.clear()
        path.write_bytes(DEMO.read_bytes())
        assert greedy_text(runner.context, PROMPT, 16) == expected


def test_json_has_the_tier() -> None:
    result = CliRunner().invoke(
        app, ["run", "-m", str(DEMO), "-p", PROMPT, "-n", "8", "-dev", "none", "--ram", "6", "--json", "-"]
    )
    assert result.exit_code == 0, result.output
    tier = json.loads(result.stdout)["tier"]
    assert tier["n_slots"] > 0
    assert tier["depth"] >= 1.0
