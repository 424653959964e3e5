"""Layers that are whole on a CUDA device, a real one or tools/cuda_emulator's: right, calling nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf_models as models
import numpy as np
import pytest
from conftest import ROOT
from gguf import GGMLQuantizationType as Type
from llama_helpers import Sequence0, decide_all, decode, loaded_model, new_context, place
from test_in_stream import split_context

from pyspac.engine.board import LayerMode
from tools.cuda_emulator.calls import MARK, N_COUNTED

WIDTHS = (5, 1, 1, 1, 9, 9, 9, 2, 40, 1, 40)
N_LAYERS = 6  # of the demo model

pytestmark = pytest.mark.gpu


def logits_of(path: Path, whole: list[int], host_mode: str) -> list[np.ndarray]:
    """With all experts on the device, and some layers whole from the third batch on."""
    with split_context(path, host_mode=host_mode, cache="100%", stage="never") as (ctx, engine):
        tokens, logits = Sequence0(1, models.N_VOCAB), []
        decide_all(engine)
        place(engine)
        for i in range(12):
            if i == 2:
                with engine.board.decision():
                    engine.board.want_whole[whole] = 1
            logits.append(decode(ctx, tokens.next_batch(1)))
            engine.end_forward()
            engine.wait_idle(5000)
        assert np.flatnonzero(engine.board.whole == LayerMode.WHOLE).tolist() == whole
        return logits + [decode(ctx, tokens.next_batch(width)) for width in WIDTHS]


def stock_on_the_cpu(path: Path) -> list[np.ndarray]:
    with loaded_model(path) as model, new_context(model) as ctx:
        tokens = Sequence0(1, models.N_VOCAB)
        return [decode(ctx, tokens.next_batch(width)) for width in (*[1] * 12, *WIDTHS)]


def distance(logits: list[np.ndarray], from_: list[np.ndarray]) -> float:
    """Relative, which half of the tokens stay below: where experts are nearly tied, one may be far off."""
    one, other = np.concatenate(logits), np.concatenate(from_)
    return float(np.median(np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)))


@pytest.mark.parametrize(("name", "host_mode"), [("gpt-oss", "in-stream"), ("qwen3moe", "executor")])
def test_logits_are_as_near_as_those_of_split_layers(name: str, host_mode: str, tmp_path: Path) -> None:
    """Kernels are fused otherwise where nothing is added from the host, so bits may differ."""
    path = models.write_model(tmp_path / "model.gguf", name, (Type.Q8_0,))
    stock = stock_on_the_cpu(path)
    of_split = distance(logits_of(path, [], host_mode), stock)
    for whole in ([1], [0, 1, 2]):
        assert 0.0 < distance(logits_of(path, whole, host_mode), stock) < 1.5 * of_split


def calls_per_step(form: str, trace: Path) -> Counter[str]:
    """What the decoding thread calls in a step that is not replayed as a CUDA graph."""
    command = [sys.executable, "-m", "tools.cuda_emulator.calls", "--form", form, "--trace", str(trace)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks" / "gpu")])
    names = {"GGML_CUDA_DISABLE_GRAPHS": "1", "CUDA_EMULATOR_TRACE": str(trace), "PYTHONPATH": paths}
    subprocess.run(command, env=os.environ | names, check=True, timeout=240, cwd=ROOT)
    lines = trace.read_text().splitlines(keepends=True)
    first, last = (index for index, line in enumerate(lines) if line == MARK)
    calls = [line.split() for line in lines[first + 1 : last]]
    if not calls:
        pytest.skip("only the emulated device tells what is called")
    thread = next(call[0] for call in calls if call[1] == "kernel")
    total = Counter(call[1] for call in calls if call[0] == thread)
    return Counter({name: n // N_COUNTED for name, n in total.items()})


def test_a_whole_layer_calls_nobody(tmp_path: Path) -> None:
    """Of a split layer dispatch and collect, and four copies; of a whole one nothing, and nobody waits."""
    split, some, whole = (
        calls_per_step(form, tmp_path / form) for form in ("in-stream", "some-whole", "all-whole")
    )
    functions = "cudaLaunchHostFunc"
    assert split[functions] == 2 * N_LAYERS  # dispatch and collect
    assert some[functions] == N_LAYERS
    assert whole[functions] == 0
    copies = "cudaMemcpyAsync"
    assert split[copies] - some[copies] == 4 * N_LAYERS // 2
    assert some[copies] - whole[copies] >= 4 * N_LAYERS // 2
    waits = "cudaStreamSynchronize"
    assert whole[waits] <= some[waits] <= split[waits]
