"""--device auto takes all GPUs of the machine, and those have experts that have MoE layers.

Needs two of them: CUDA_EMULATOR_DEVICES=2, or GGML_VK_VISIBLE_DEVICES=0,0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_models as models
import pytest
from serving import TARGET, run_pyspac

from pyspac.engine.devices import choose_device, gpu_devices

BACKENDS = [
    pytest.param("CUDA", marks=pytest.mark.gpu),
    pytest.param("Vulkan", marks=pytest.mark.vulkan),
]


def two(backend: str) -> list[str]:
    names = [device.name for device in gpu_devices() if device.name.startswith(backend)]
    if len(names) != 2:
        pytest.skip(f"{len(names)} {backend} devices, not two")
    return names


def run(tmp_path: Path, model: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The report, and what was said."""
    done = run_pyspac(
        "run", "-m", str(model), "-p", "ab", "-n", "4", "--temp", "0", "--json", "-", *arguments,
        cache_dir=tmp_path, timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_auto_is_all_gpus(backend: str, tmp_path: Path) -> None:
    both = two(backend)
    assert [part.name for part in choose_device("auto").parts] == both
    assert choose_device(both[1]).name == both[1]
    auto, _ = run(tmp_path, TARGET, "--cache", "25%")
    named, _ = run(tmp_path, TARGET, "--cache", "25%", "--device", ",".join(both))
    assert auto["device"] == named["device"] == ",".join(both)
    assert auto["token_ids"] == named["token_ids"]
    assert [row["n_layers"] for row in auto["devices"]] == [row["n_layers"] for row in named["devices"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_layers_than_gpus(backend: str, tmp_path: Path) -> None:
    """One layer, and the output, which the second GPU computes; named, it is an error."""
    both = two(backend)
    model = models.write_model(tmp_path / "model.gguf", "qwen3moe", n_layer=1)
    auto, said = run(tmp_path, model, "--cache", "25%", "-v")
    assert auto["device"] == both[0]
    assert [row["name"] for row in auto["devices"]] == [both[0]]
    assert f"llama.cpp gives {both[1]} no MoE layer of this model: it holds no experts" in said
    refused = run_pyspac(
        "run", "-m", str(model), "-p", "ab", "--device", ",".join(both), cache_dir=tmp_path, timeout_s=300
    )
    assert refused.returncode == 2
    assert f"gives {both[1]} no MoE layer of this model: leave it out of --device" in refused.stderr
