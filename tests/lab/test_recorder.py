"""What the engine records of the routers: the same as llama.cpp's own callback sees, whole or not at all."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import psutil
import pytest
from probe import Probe, ProbedContext
from recording import Recording
from serving import DRAFT, TARGET, environment, has_ended, wait_for
from typer.testing import CliRunner

from pyspac._native import lib_dir
from pyspac.cli import app
from pyspac.engine.attached import TRACE
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.libllama import LlamaError
from pyspac.forward.model import Model, ModelParams
from pyspac.lab.raw_trace import RawPass, read_passes
from pyspac.lab.recorder import ends_with, read_target, without_undecided
from pyspac.lab.trace import TokenStatus, TraceError
from pyspac.lab.trace_builder import Pass, build_trace, trace_geometry
from pyspac.lab.trace_file import read_trace
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import read_header

STEPS = ([11, 12, 13, 14, 15, 16, 17], [20], [21, 22, 23], [24])
CONTEXT = ContextParams(n_ctx=256, n_outputs_max=3, n_threads=1)
ADDS = ("logits", "inputs")
END_S = 60.0


def decode(context: Context, steps: Any = STEPS) -> list[Any]:
    """What the probe of a probed context saw, step by step."""
    seen = []
    for step in steps:
        context.decode(step, min(len(step), 3))
        if isinstance(context, ProbedContext):
            seen.append(dict(context.probe.layers))
            context.probe.layers.clear()
    return seen


def as_in_file(path: Path) -> ModelParams:
    """Not in a buffer of AMX: there llama.cpp ends the process at DeepSeek's 3-dimensional F16 matrices."""
    return ModelParams(path=path, use_extra_bufts=False)


def record(model: Path, path: Path, *adds: str) -> list[RawPass]:
    recording = Recording(path, *adds)
    with Model(as_in_file(model)) as loaded, Context(loaded, CONTEXT) as context:
        assert recording.watch(context)
        decode(context)
    return recording.passes()


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a small model."""
    folder = tmp_path_factory.mktemp("raw")
    model = gguf_models.write_model(folder / "model.gguf", "qwen3moe", n_layer=2)
    record(model, folder / "raw", *ADDS)
    return folder / "raw"


# ---- what is in it


@pytest.mark.parametrize(
    "name", ["qwen3moe", "gpt-oss", "deepseek3", "llama4", "smallthinker", "qwen3next", "nemotron-h-moe"]
)
def test_the_engine_records_what_llama_cpp_s_callback_sees(tmp_path: Path, name: str) -> None:
    path = gguf_models.write_model(tmp_path / "model.gguf", name)
    probe = Probe(read_geometry(read_header(path)))
    with Model(as_in_file(path)) as model, ProbedContext(model, CONTEXT, probe) as context:
        seen = decode(context)
    found = record(path, tmp_path / "raw", *ADDS)
    assert [one.tokens.tolist() for one in found] == [list(step) for step in STEPS]
    assert [one.positions.tolist() for one in found] == [[*range(7)], [7], [8, 9, 10], [11]]
    for one, layers in zip(found, seen, strict=True):
        of_what = {(what, il) for what in ("topk", "weights") for il in one.nodes[what]}
        assert of_what == {key for key in layers if key[0] != "logits"}
        assert len(of_what) >= 2
        for what, il in of_what:
            assert np.array_equal(one.nodes[what][il], layers[what, il]), (what, il)
        for il, logits in one.nodes["logits"].items():
            biased = layers["logits", il] + one.constants.get("bias", {}).get(il, np.float32(0))
            assert np.array_equal(logits, biased)
            router, inputs = one.constants["router"][il], one.nodes["input"][il]
            assert np.allclose(inputs @ router.T, layers["logits", il], atol=1e-4)


def test_a_prompt_in_pieces_is_the_same_prompt(tmp_path: Path) -> None:
    """A piece without outputs leaves nothing to the last layer."""
    params = replace(CONTEXT, n_ubatch=4)
    recording = Recording(tmp_path / "raw", "inputs", "draft-inputs")
    with Model(ModelParams(path=TARGET)) as model, Context(model, params) as context:
        assert recording.watch(context)
        context.decode(STEPS[0], 1)
    passes = read_target(recording.passes(), wants_early=True, gates=range(6))
    assert [one.n_token for one in passes] == [4, 3]
    trace = build_trace(trace_geometry(TARGET), passes, len(STEPS[0]))
    assert trace.token_id is not None
    assert trace.token_id.tolist() == STEPS[0]
    assert trace.early_logits is not None
    is_known = np.isfinite(trace.early_logits[0, :, :, 0])
    assert is_known[:, 1:-1].all()
    assert is_known[:, -1].tolist() == [False] * 6 + [True]


def test_it_is_asked_for_what_it_records(tmp_path: Path) -> None:
    model = gguf_models.write_model(tmp_path / "model.gguf", "gpt-oss", n_layer=2)
    kinds = {
        adds: (set(found[0].nodes), set(found[0].constants))
        for adds in ((), ("logits",), ("inputs",), ("draft-inputs",))
        if (found := record(model, tmp_path / "raw", *adds))
    }
    assert kinds == {
        (): ({"topk", "weights"}, set()),
        ("logits",): ({"topk", "weights", "logits"}, set()),
        ("inputs",): ({"topk", "weights", "input"}, {"router", "bias"}),
        ("draft-inputs",): ({"topk", "weights"}, {"router", "bias"}),
    }


def test_a_draft_model_s_inputs_come_alone(tmp_path: Path) -> None:
    path = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe", n_layer=2)
    for adds, kinds in (((), set()), (("draft-inputs",), {"input"})):
        recording = Recording(tmp_path / "raw", *adds)
        with (
            Model(ModelParams(path=path)) as model,
            Context(model, CONTEXT) as target,
            Context(model, CONTEXT) as draft,
        ):
            assert recording.watch(target)
            assert recording.watch(draft)
            decode(draft, STEPS[:2])
            decode(target, STEPS[:1])
        of_draft = [set(one.nodes) for one in recording.passes() if one.context == 1]
        assert of_draft == ([kinds] * 2 if kinds else [])
        assert recording.passes()[-1].context == 0


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "deepseek", "llama4"])
def test_a_draft_s_layers_have_one_input_each(tmp_path: Path, name: str) -> None:
    """Of the router where there is one, whatever shared experts stand beside it; of the FFN else."""
    path = gguf_models.write_model(tmp_path / "model.gguf", name)
    recording = Recording(tmp_path / "raw", "inputs", "draft-inputs")
    with (
        Model(ModelParams(path=path)) as model,
        Context(model, CONTEXT) as one,
        Context(model, CONTEXT) as two,
    ):
        for context in (one, two):
            assert recording.watch(context)
            decode(context)
    of_target, of_draft = ([p for p in recording.passes() if p.context == i] for i in (0, 1))
    for target, draft in zip(of_target, of_draft, strict=True):
        inputs = draft.nodes["input"]
        assert sorted(inputs) == list(range(gguf_models.ARCHITECTURES[name].shape.n_layer))
        for il, rows in target.nodes["input"].items():
            assert np.array_equal(rows, inputs[il])


# ---- off


def test_without_the_variable_there_is_no_hook(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(lib_dir() / "libllama.so"))
    library.llama_get_moe_hook.restype = ctypes.POINTER(ctypes.c_void_p)
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe", n_layer=2)
    with Model(as_in_file(model)) as loaded, Context(loaded, CONTEXT) as context:
        hook = library.llama_get_moe_hook(ctypes.c_void_p(context.ptr))
        assert hook[0] is None
        assert Recording(tmp_path / "raw").watch(context)
        assert hook[0] is not None


def test_what_pyspac_starts_does_not_see_the_variable(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyspac", "run", "-m", str(TARGET), "-p", "a", "-n", "2", "-t", "1"],
        env=environment(tmp_path) | {TRACE: str(tmp_path / "raw")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=END_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "raw").exists()


# ---- files that are no recording


def test_a_file_that_is_cut_off_is_refused(raw: Path, tmp_path: Path) -> None:
    data, whole = raw.read_bytes(), len(list(read_passes(raw.open("rb"))))
    n_refused = 0
    for end in range(0, len(data), max(1, len(data) // 300)):
        path = tmp_path / "cut"
        path.write_bytes(data[:end])
        with path.open("rb") as file:
            try:
                assert len(list(read_passes(file))) < whole  # between two records
            except TraceError:
                n_refused += 1
            if end >= 8:
                assert len(list(read_passes(file, is_whole=False))) < whole
    assert n_refused > 250


def test_a_file_that_is_damaged_is_refused(raw: Path, tmp_path: Path) -> None:
    rng, data = np.random.default_rng(1), raw.read_bytes()
    for _ in range(200):
        wrong = bytearray(data)
        for at in rng.integers(0, len(data), 50):
            wrong[at] ^= int(rng.integers(1, 256))
        (tmp_path / "wrong").write_bytes(wrong)
        with (
            (tmp_path / "wrong").open("rb") as file,
            suppress(TraceError),
            np.errstate(all="ignore"),
        ):
            read_target(read_passes(file), wants_logits=True, wants_early=True)
    with (tmp_path / "empty").open("w+b") as file, pytest.raises(TraceError, match="is empty"):
        list(read_passes(file))


def test_what_was_there_before_is_left_out(raw: Path) -> None:
    with raw.open("rb") as file:
        size = raw.stat().st_size
        found = [list(read_passes(file, since)) for since in (*range(0, size, size // 200), size)]
    assert {len(passes) for passes in found} == set(range(len(STEPS) + 1))
    assert all(set(passes[0].constants["router"]) == {0, 1} for passes in found if passes)


# ---- what cannot be written


def refusal(path: Path, capfd: pytest.CaptureFixture[str], *adds: str) -> str:
    """What the engine says of a context that it does not record."""
    with Model(ModelParams(path=TARGET)) as model, Context(model, CONTEXT) as context:
        assert not Recording(path, *adds).watch(context)
    return capfd.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = refusal(tmp_path / "no" / "raw", capfd)
    assert 'raw": No such file or directory; give another file' in said


def test_an_unknown_thing_to_add(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert 'PYSPAC_TRACE_ADD "inputs,x": give logits' in refusal(tmp_path / "raw", capfd, "inputs", "x")


def test_two_programs_do_not_write_one_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened = f"open({str(tmp_path / 'raw')!r}, 'wb')"
    code = f"import fcntl; f = {opened}; fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        assert "another process writes it" in refusal(tmp_path / "raw", capfd)
        other.stdin.write(b"\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_that_is_full_ends_the_decoding(capfd: pytest.CaptureFixture[str]) -> None:
    with Model(ModelParams(path=TARGET)) as model, Context(model, CONTEXT) as context:
        assert Recording(Path("/dev/full")).watch(context)
        decode(context, STEPS[:1])  # the error comes at its end
        with pytest.raises(LlamaError):
            decode(context, STEPS[1:])
    said = capfd.readouterr().err
    assert said.count("/dev/full cannot be written (No space left on device)") == 1


def test_a_split_is_not_recorded(tmp_path: Path, bin_dir: Path) -> None:
    command = [bin_dir / "llama-perplexity", "-m", TARGET, "-f", TARGET]
    variables = {"PYSPAC_CACHE": "0", "PYSPAC_DEVICE": "none", TRACE: str(tmp_path / "raw")}
    done = subprocess.run(
        command, env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=END_S
    )
    assert done.returncode != 0
    assert b"PYSPAC_TRACE records graphs that are not split: unset PYSPAC_CACHE" in done.stderr


# ---- what became of drafts


def passes_of(*steps: tuple[int, tuple[int, ...]]) -> list[RawPass]:
    """Passes that one layer ran in, by first position and tokens."""
    found = []
    for at, tokens in steps:
        experts = np.zeros((len(tokens), 1), np.int32)
        found.append(RawPass(0, np.array(tokens), at + np.arange(len(tokens)), {"topk": {0: experts}}, {}))
    return found


def kept(passes: list[Pass]) -> list[int]:
    return [one.n_kept for one in passes]


def test_a_position_that_comes_again_was_taken_back() -> None:
    passes = read_target(passes_of((0, (1, 2)), (2, (3, 4, 5)), (4, (9, 8, 7)), (7, (6, 5, 4))))
    assert kept(passes) == [2, 2, 3, 3]
    assert ends_with(passes, 2, [3, 4, 9, 8, 7, 6, 5, 1])
    assert kept(passes) == [2, 2, 3, 2]  # the last one by the text
    assert not ends_with(passes, 2, [3, 4, 9, 8, 7, 6, 5, 1, 1])
    assert not ends_with(passes[:1], 3, [4])


def test_drafts_whose_fate_is_unknown_are_left_out() -> None:
    passes = read_target(passes_of((0, (1, 2)), (2, (3, 4, 5))))
    assert without_undecided(passes, 2) == passes[:1]
    assert without_undecided(passes[:1], 2) == passes[:1]


def test_a_prompt_ends_once() -> None:
    """What follows may stand before its end where the context was shifted."""
    passes = read_target(passes_of((0, (1, 2, 3)), (3, (4,)), (2, (5,))))
    geometry = trace_geometry(TARGET)
    status = build_trace(geometry, passes, 3).status
    assert status.tolist() == [TokenStatus.PROMPT] * 3 + [TokenStatus.SAMPLED] * 2


# ---- the command


class Command:
    """One `pyspac trace` that goes on for long."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output, self.shown = folder / "t.parquet", folder / "shown"
        argv = ["trace", "-m", str(TARGET), "-p", "import os", "-o", str(self.output), "-t", "1"]
        goes_on = ("-n", "9999", "--ignore-eos", "--context-shift")
        with self.shown.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pyspac", *argv, *arguments, *goes_on],
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )

    def server(self) -> psutil.Process:
        """As soon as it answers."""
        wait_for("text", lambda: self.shown.stat().st_size > 20, END_S)
        children = psutil.Process(self.process.pid).children()
        [server] = [child for child in children if child.name() == "llama-server"]
        return server

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=END_S)
        return self.process.returncode, said


@pytest.mark.model
def test_ctrl_c_writes_what_was_recorded(tmp_path: Path) -> None:
    command = Command(tmp_path, "-md", str(DRAFT), "--draft-max", "3")
    server = command.server()
    command.process.send_signal(signal.SIGINT)
    code, said = command.end()
    assert code == 130, said
    assert has_ended(server.pid)
    trace = read_trace(command.output)
    assert trace.n_token > trace.n_prompt > 0
    assert trace.has_drafts
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"t.parquet", "shown"}


@pytest.mark.model
def test_a_server_that_is_killed_leaves_no_trace(tmp_path: Path) -> None:
    command = Command(tmp_path)
    command.server().kill()
    code, said = command.end()
    assert code == 1
    assert "was killed by SIGKILL" in said
    assert not command.output.exists()


@pytest.mark.model
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_no_room_for_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = partial(open, "/dev/full", "r+b")
    monkeypatch.setattr("pyspac.commands.trace._raw_file", lambda _folder: full())
    out = tmp_path / "t.parquet"
    result = CliRunner().invoke(app, ["trace", "-m", str(TARGET), "-p", "a", "-n", "9", "-o", str(out)])
    said = " ".join(result.output.split())
    assert result.exit_code == 1, said
    assert "the record of the routing cannot be written (No space left on device)" in said
    assert not out.exists()
