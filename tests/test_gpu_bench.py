"""The GPU benchmark's pieces, with the CPU as the device; what needs a GPU carries the marker `gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from gguf import GGUFReader

GPU_DIR = ROOT / "benchmarks" / "gpu"
sys.path[:0] = [str(GPU_DIR), str(ROOT / "scripts")]

import arms  # noqa: E402
import builder  # noqa: E402
import bundle  # noqa: E402
import launch  # noqa: E402
import logits  # noqa: E402
import make_synthetic_gguf as maker  # noqa: E402
import prediction  # noqa: E402
import replay  # noqa: E402
import settings  # noqa: E402
import synthetic  # noqa: E402
import table  # noqa: E402
import timeline  # noqa: E402
import wheels  # noqa: E402

from pyspac.engine.devices import choose_device, cpu_device  # noqa: E402
from pyspac.model.geometry import read_geometry  # noqa: E402
from pyspac.model.gguf_header import read_header  # noqa: E402

TINY = maker.Geometry(
    arch="qwen3moe",
    n_layer=2,
    n_embd=256,
    n_head=4,
    n_head_kv=2,
    n_head_dim=64,
    n_ff_exp=256,
    n_expert=16,
    n_expert_used=4,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as the phase `model` writes it, by two processes."""
    path = tmp_path_factory.mktemp("model") / "tiny-2-layers.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(maker.GEOMETRIES, "tiny", TINY)
        synthetic.make_model(path, settings.Settings(like="tiny"), 2, 2)
    return path


def run_bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(GPU_DIR / "run.py"), *map(str, arguments)],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=240,
    )


# ---- the whole run -------------------------------------------------------------------------------


def test_a_rehearsal_on_the_cpu_gives_rows_and_a_table(tiny: Path, tmp_path: Path) -> None:
    done = run_bench(
        "--device",
        "cpu",
        "--no-build",
        "--model",
        tiny,
        "--phases",
        "model,measure,timeline,compare",
        "--work",
        tmp_path,
        "--out",
        tmp_path,
        "--tokens",
        16,
        "--warm-up",
        8,
        "--rounds",
        2,
        "--threads",
        1,
        "--cache",
        "50%",
        "--arms",
        "stock-ar,ncmoe-sd,split-ema,spac-without-evict",
        "--budget",
        200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        json.loads(line) for path in tmp_path.glob("gpu-*.jsonl") for line in path.read_text().splitlines()
    ]
    timeline_row = next(row for row in rows if row["row"] == "timeline")
    assert {span[0] for span in timeline_row["spans"]} >= {"dispatch", "device", "host"}
    assert {span[1] for span in timeline_row["spans"]} == {0, 1}  # layers
    assert timeline_row["device_spans"] == "host clocks"
    assert 0 <= timeline_row["overlap"] <= 1  # none where the layers are tiny and the machine is busy
    assert (tmp_path / "timeline-cpu.png").stat().st_size > 1000
    compared = {(row["group"], row["arm"]): row for row in rows if row["row"] == "compare"}
    assert compared.keys() == {
        ("controls", "stock-ar"),
        ("controls", "stock-sd"),
        ("controls", "split-ema"),
        ("ablations", "stock-sd"),
        ("ablations", "spac-without-evict"),
    }
    split = compared["controls", "split-ema"]
    assert split["emulated"] == ["device emulated on the CPU"]
    assert split["rounds"] == 2
    assert 0 < split["coverage"] <= 1
    assert split["pinned_steals"] == 0
    assert split["agreement"] == 1
    assert split["tokens_per_step"] == compared["controls", "stock-sd"]["tokens_per_step"] > 1
    assert compared["controls", "stock-ar"]["tokens_per_step"] == 1
    assert split["settings"]["acceptance"] == 0.75
    assert split["machine"]["pyspac_commit"]
    assert "ncmoe-ar, ncmoe-sd: the device is the CPU" in done.stdout
    assert "replayed at acceptance 0.75" in done.stdout


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    done = run_bench(
        "--device", "cpu", "--no-build", "--phases", "compare", "--work", tmp_path, "--out", tmp_path
    )
    assert "skipped compare: no model" in done.stdout
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--phases", "bake"], "--phases bake: unknown"),
        (["--acceptance", "1.5"], "--acceptance 1.5"),
        (["--draft-max", "16"], "--draft-max 16"),
        (["--model", "/nowhere/model.gguf"], "no such file"),
    ],
)
def test_wrong_options_say_what_is_allowed(arguments: list[str], message: str) -> None:
    done = run_bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_help_teaches() -> None:
    text = run_bench("--help").stdout
    assert "examples:" in text
    assert all(phase in text for phase in settings.PHASES)


# ---- logits --------------------------------------------------------------------------------------


def test_logits_with_the_cpu_as_device_are_equal(tiny: Path) -> None:
    row = logits.compare(tiny, cpu_device(), 1, lambda text: None)
    assert row["ok"], row
    assert row["distances"]["split 60% - stock cpu"] == (0.0, 0.0)


@pytest.mark.gpu
def test_logits_on_the_gpu_are_as_near_as_stock_gets(tiny: Path) -> None:
    device = choose_device("auto")
    if device.is_cpu:
        pytest.skip("this build has no CUDA")
    row = logits.compare(tiny, device, 2, print)
    assert row["ok"], row


@pytest.mark.parametrize("split_distance", [(1e-2, 2e-2), (1e-3, 0.5), (float("nan"), 1e-3)])
def test_logits_too_far_away_fail(split_distance: tuple[float, float]) -> None:
    distances = {"stock device - stock cpu": (1e-3, 2e-3), "split 17% - stock cpu": split_distance}
    assert not logits.verdict(distances)["ok"]


# ---- contenders ----------------------------------------------------------------------------------


def test_replayed_drafts_are_right_as_often_as_asked() -> None:
    sequence = list(range(1000, 5000))
    drafts = replay.ReplayDrafts(sequence, acceptance=0.7, seed=1)
    again = replay.ReplayDrafts(sequence, acceptance=0.7, seed=1)
    n_right = 0
    for at in range(1, 3900):
        tokens = drafts.draft(at, 4)
        assert tokens == again.draft(at, 4)
        assert len(tokens) == 4
        n_right += tokens[0] == sequence[at]
    assert n_right / 3899 == pytest.approx(0.7, abs=0.03)
    assert drafts.draft(len(sequence), 4) == []  # nothing follows


def test_wrong_drafts_are_wrong_in_texts_that_repeat() -> None:
    sequence = [7] * 500
    drafts = replay.ReplayDrafts(sequence, acceptance=0.5, seed=2).draft(1, 400)
    assert drafts.count(7) == pytest.approx(200, abs=60)


def test_all_contenders_go_on_with_the_same_tokens() -> None:
    """Wrong drafts are rejected, right ones accepted, and own choices counted, not taken."""

    class Context:  # whose own choice is always 1
        n_past = 0

        def decode(self, tokens: list[int], n_outputs: int = 1) -> Any:
            self.n_past += len(tokens)
            return np.tile(np.eye(6, dtype=np.float32)[1], (n_outputs, 1))

        def rollback(self, n_past: int) -> None:
            self.n_past = n_past

    drafts = replay.ReplayDrafts([0, 3, 1, 4, 1], acceptance=1.0, seed=0)
    drafts.is_right[3] = False
    context: Any = Context()
    steps = replay.Replay(context, drafts)
    steps.read(1)
    assert (steps.n_known, steps.n_other) == (2, 1)
    record = steps.step(2)  # of 1 and another one than 4
    assert (record.n_draft, record.n_accepted, record.n_tokens) == (2, 1, 3)
    assert (steps.n_known, context.n_past) == (4, 3)
    assert steps.step(0).n_draft == 0
    assert (steps.n_known, context.n_past) == (5, 4)
    assert steps.agreement == 0.5


@pytest.mark.parametrize(("share", "layers"), [(0.0, []), (0.49, []), (0.5, [1]), (0.99, [1]), (1.0, [1, 0])])
def test_n_cpu_moe_gets_the_last_layers_that_fit(tiny: Path, share: float, layers: list[int]) -> None:
    geometry = read_geometry(read_header(tiny))
    assert arms.device_layers(geometry, int(share * geometry.experts_bytes)) == layers


def test_host_pattern_names_whole_layers(tiny: Path) -> None:
    import re

    pattern = arms.host_pattern(read_geometry(read_header(tiny)), on_device=[1])
    assert re.search(pattern, b"blk.0.ffn_gate_exps.weight")
    assert not re.search(pattern, b"blk.1.ffn_gate_exps.weight")
    assert not re.search(pattern, b"blk.10.ffn_gate_exps.weight")
    assert not re.search(pattern, b"blk.0.ffn_gate_inp.weight")


def test_every_group_of_contenders_has_the_baseline() -> None:
    everything = arms.chosen_arms(settings.Settings())
    for group in {arm.group for arm in everything}:
        assert [arm.name for arm in everything if arm.group == group].count(arms.BASELINE) == 1
    named = arms.chosen_arms(settings.Settings(arms=("split-lru",)))
    assert [arm.name for arm in named] == ["stock-sd", "split-lru"]
    with pytest.raises(ValueError, match="split-best: unknown"):
        arms.chosen_arms(settings.Settings(arms=("split-best",)))


def test_table_shows_ratios_and_what_is_emulated() -> None:
    row: dict[str, Any] = {
        "group": "controls",
        "arm": "split-ema",
        "rounds": 3,
        "tps": 20.0,
        "tps_min": 19.0,
        "tps_max": 21.0,
        "tpot_ms": 50.0,
        "ratio": 1.5,
        "ratio_min": 1.4,
        "ratio_max": 1.6,
        "tokens_per_step": 3.0,
        "coverage": 0.6,
        "loaded_mib_per_step": 9.5,
        "wait_ms_per_step": 12.0,
        "model": "m.gguf",
        "n_layer": 48,
        "experts_mib": 16000.0,
        "cache": "17%",
        "n_cpu_moe": 40,
        "n_threads": 16,
        "drafts": "replayed",
        "draft_max": 4,
        "draft_ms": 0.0,
        "emulated": ["link emulated at 25 GB/s"],
        "pool_capped": True,
        "device": "CUDA0",
        "device_expert_mib": 2720.0,
        "agreement": 0.98,
    }
    text = "\n".join(table.comparison([row]))
    for part in (
        "1.500",
        "1.40..1.60",
        "60.0%",
        "emulated: link emulated",
        "pool capped: CUDA0",
        "split-ema 2.0%",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 130


# ---- timeline ------------------------------------------------------------------------------------


def test_overlap_is_the_share_of_host_time_beside_the_device() -> None:
    """Host experts 0 .. 10 and 20 .. 30; the device 5 .. 8, 7 .. 12 and 40 .. 50: 5 of 20."""
    spans = [("host", 0, 0.0, 10.0), ("host", 1, 20.0, 30.0)]
    device = [(5.0, 8.0), (7.0, 12.0), (40.0, 50.0)]
    assert timeline.overlap_share(spans + [("device", 0, *interval) for interval in device]) == 0.25
    assert timeline.overlap_share(spans) == 0.0
    kernels = [("kernel", -1, 0.0, 30.0), ("device", 0, 40.0, 50.0)]  # kernels are what counts
    assert timeline.overlap_share(spans + kernels) == 1.0


def test_kernels_of_a_trace_are_on_our_clock() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "name": timeline.MARK, "cat": "user_annotation", "ts": 1000.0, "dur": 1.0},
            {"ph": "X", "name": "mul_mat_q", "cat": "kernel", "ts": 1010.0, "dur": 5.0},
            {"ph": "X", "name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 1009.0, "dur": 2.0},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert timeline.kernels_of_trace(trace, mark_us=50.0) == [(60.0, 65.0)]


# ---- model, wheels, sources ----------------------------------------------------------------------


def test_tensors_written_in_parallel_are_whole(tiny: Path) -> None:
    reader = GGUFReader(tiny)
    planned = list(maker.plan_tensors(TINY, synthetic.N_VOCAB, 0))
    assert [tensor.name for tensor in reader.tensors] == [tensor.name for tensor in planned]
    assert all(tensor.data.any() for tensor in reader.tensors)
    assert not list(tiny.parent.glob("*.part"))


def test_wheels_are_unpacked_without_pip(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "demo-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("demo/__init__.py", "answer = 42\n")
        wheel.writestr("demo-1.data/purelib/more.py", "")
        wheel.writestr("demo-1.data/scripts/tool", "#!/bin/sh\n")
        wheel.writestr("../outside.py", "")
    site = tmp_path / "site"
    assert wheels.unpack_wheels(folder, site) == 1
    assert (site / "demo" / "__init__.py").is_file()
    assert (site / "more.py").is_file()
    assert os.access(site / "bin" / "tool", os.X_OK)
    assert not (tmp_path / "outside.py").exists()


def test_sources_of_the_bundle_need_no_network(tmp_path: Path) -> None:
    """All that the build reads is there, nothing large is, and there is nothing left to patch."""
    archive = tmp_path / "sources.tar.gz"
    bundle.write_sources(archive, bundle.patched_tree())
    assert archive.stat().st_size < 8 << 20
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    for name in (
        "CMakeLists.txt",
        "engine/include/spac.h",
        "pyspac/forward/context.py",
        "benchmarks/gpu/run.py",
        "benchmarks/machine.py",
        "scripts/make_synthetic_gguf.py",
        "build/llama.cpp/src/models/qwen3moe.cpp",
        "build/llama.cpp/ggml/src/ggml-cuda/mmvq.cu",
        "build/llama.cpp/ggml/src/ggml-cpu/ggml-cpu.c",
    ):
        assert name in names
    assert not [name for name in names if name.endswith((".gguf", ".so", ".pyc"))]

    source = tmp_path / "source"
    assert launch.unpack(archive, source) == len(names)
    assert launch.unpack(archive, source) == 0
    prepared = subprocess.run(
        [sys.executable, "-m", "tools.patches", "prepare"],
        cwd=source,
        env=os.environ | {"PYSPAC_SDIST": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stdout.strip() == str(source / "build" / "llama.cpp")


def test_cublas_of_a_python_package_is_named_to_cmake(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libcublas.so.13"
    library.parent.mkdir()
    library.touch()
    options = builder.link_cublas(tmp_path / "include", [library], tmp_path / "links")
    assert f"-DCUDA_cublas_LIBRARY={tmp_path}/links/libcublas.so" in options
    assert f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,{tmp_path}/lib" in options
    assert (tmp_path / "links" / "libcublas.so").resolve() == library


# ---- the prediction ------------------------------------------------------------------------------


def test_prediction_by_hand() -> None:
    """A layer with stops costs 40 us, in the stream 8 us and two functions: the same at 16 us each."""
    assert prediction.BREAK_EVEN_US == 16
    assert prediction.host_function_us(10.0, 10.0, 48) == pytest.approx(16)
    assert prediction.host_function_us(10.0, 10.0 - 48 * 0.022, 48) == pytest.approx(5)
    rows = [
        {"arm": "split-ema", "tpot_ms": 4.0, "tokens_per_step": 2.5, "n_layer": 48, "emulated": []},
        {"arm": "split-ema-stops", "tpot_ms": 5.5, "tokens_per_step": 2.0, "n_layer": 48, "emulated": []},
    ]
    assert "host function of 5.6 us (it wins below 16)" in prediction.notes(rows)[0]
    assert prediction.notes(rows[:1]) == []
    assert prediction.notes([]) == []
    assert prediction.notes([row | {"emulated": ["a GPU"]} for row in rows]) == []
