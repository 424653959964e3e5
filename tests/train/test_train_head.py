"""Heads trained from only a GGUF: what is captured, what is computed, what is learned, what is refused."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
from conftest import ROOT
from near_ties import NEAR_TIE, margins
from serving import ONE_THREAD, Serve, post
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.commands import train_head as command
from pyspac.commands.demo import TARGET
from pyspac.errors import EngineError, UsageError
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.hidden_states import HiddenStates
from pyspac.forward.model import Model, ModelParams
from pyspac.forward.options import ForwardOptions
from pyspac.forward.runner import Runner
from pyspac.train.packages import missing_packages

MISSING = missing_packages(command.PACKAGES)
train = [pytest.mark.train, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
N_EMBD, LAYERS = 256, (1, 3, 5)
IDS = [5, 900, 31, 7, 7, 1203, 44, 2]


# ---------------------------------------------------------------------------------------------------------
# Hidden states


@pytest.fixture
def model() -> Iterator[Model]:
    with Model(ModelParams(path=TARGET)) as opened:
        yield opened


def read_states(model: Model, layers: Sequence[int], pieces: Sequence[Sequence[int]]) -> Any:
    params = ContextParams(n_ctx=64, n_outputs_max=1)
    with Context(model, params) as context, HiddenStates(context, layers, N_EMBD) as states:
        read = []
        for piece in pieces:
            context.decode(piece)
            read.append(states.read(len(piece)))
        return np.concatenate(read)


def test_the_first_layer_reads_the_embeddings(model: Model) -> None:
    """To the last bit: they are stored in 16 bits or 8, and looked up."""
    from gguf import GGUFReader, dequantize

    table = next(t for t in GGUFReader(TARGET).tensors if t.name == "token_embd.weight")
    wanted = dequantize(table.data, table.tensor_type)[IDS]
    states = read_states(model, [0, 5], [IDS])
    assert states.shape == (len(IDS), 2, N_EMBD)
    np.testing.assert_array_equal(states[:, 0], wanted)
    assert not np.allclose(states[:, 1], wanted, atol=0.1)


def test_states_do_not_depend_on_the_batch(model: Model) -> None:
    """Apart from rounding, which differs from width to width."""
    whole = read_states(model, LAYERS, [IDS])
    in_pieces = read_states(model, LAYERS, [IDS[:3], IDS[3:4], IDS[4:]])
    np.testing.assert_allclose(in_pieces, whole, rtol=0.1, atol=0.15)
    assert np.corrcoef(in_pieces.ravel(), whole.ravel())[0, 1] > 0.999


def test_what_llama_cpp_would_abort_at_is_an_error(model: Model) -> None:
    with Context(model, ContextParams(n_ctx=64)) as context:
        for layer in (-1, 6):
            with pytest.raises(EngineError, match=rf"the layer {layer} cannot be read: give 0 to 5"):
                HiddenStates(context, [layer], N_EMBD)
        with HiddenStates(context, LAYERS, N_EMBD) as states:
            with pytest.raises(EngineError, match="no batch has been computed"):
                states.read(1)
            context.decode([5])
            with pytest.raises(EngineError, match="513 tokens cannot be read"):
                states.read(513)
        with pytest.raises(EngineError, match="from an empty context on"):
            HiddenStates(context, LAYERS, N_EMBD)


# ---------------------------------------------------------------------------------------------------------
# Texts


def about(**fields: Any) -> Any:
    from pyspac.train.captured import About

    sizes = {"n_embd": N_EMBD, "layers": LAYERS, "n_prompt": 6, "n_new": 4, "n_top": 3}
    return About(model="demo", **(sizes | fields))


def write_texts(folder: Path, prompts: Any, *, greedy: bool) -> Any:
    from pyspac.train import capture
    from pyspac.train.captured import Captured

    options = ForwardOptions(model=TARGET, n_ctx=16, n_sequences=capture.N_TEXTS, n_threads=1, device="none")
    captured = Captured(folder, about())
    with Runner(options) as runner:
        capture.write(runner, captured, prompts, greedy=greedy)
    return captured


def test_texts_are_the_models_own(tmp_path: Path, model: Model) -> None:
    """Of 18 prompts, more than one batch has: each is what the model says alone, with its own states."""
    prompts = np.random.default_rng(0).integers(10, 3000, (18, 6))
    captured = write_texts(tmp_path, prompts, greedy=True)
    rows = captured.rows(slice(None))
    assert len(captured) == 18
    np.testing.assert_array_equal(rows.ids[:, :6], prompts)
    for i in (0, 7, 17):
        ids = rows.ids[i].tolist()
        assert margins(TARGET, ids[:6], ids[6:]).max() < NEAR_TIE
        np.testing.assert_array_equal(rows.top_ids[i, :, 0], ids[6:])
        alone = read_states(model, LAYERS, [ids[:-1]])
        assert np.corrcoef(rows.states[i].astype(np.float32).ravel(), alone.ravel())[0, 1] > 0.999
    logs = rows.top_logs.astype(np.float32)
    assert (np.diff(logs, axis=-1) <= 0).all()
    assert (np.exp(logs).sum(-1) < 1.001).all()


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """And half of a text is forgotten; sampled texts are the same."""
    prompts = np.random.default_rng(0).integers(10, 3000, (20, 6))
    whole = write_texts(tmp_path / "whole", prompts, greedy=False).rows(slice(None))
    write_texts(tmp_path / "part", prompts[:16], greedy=False)
    with (tmp_path / "part" / "ids").open("ab") as file:
        file.write(b"half a text")
    gone_on = write_texts(tmp_path / "part", prompts, greedy=False).rows(slice(None))
    np.testing.assert_array_equal(gone_on.ids, whole.ids)
    assert (whole.top_ids[0::2, :, 0] == whole.ids[0::2, 6:]).all()  # greedy
    assert (whole.top_ids[1::2, :, 0] != whole.ids[1::2, 6:]).any()  # sampled


def test_texts_of_another_run_are_refused(tmp_path: Path) -> None:
    from pyspac.train.captured import Captured

    Captured(tmp_path, about())
    with pytest.raises(UsageError, match=r"n_top 3 instead of 4\); give another --work-dir"):
        Captured(tmp_path, about(n_top=4))
    prompts = np.random.default_rng(0).integers(10, 3000, (2, 6))
    write_texts(tmp_path, prompts, greedy=True)
    with pytest.raises(UsageError, match="has texts behind other prompts"):
        write_texts(tmp_path, prompts + 1, greedy=True)


def test_likeliest_by_hand() -> None:
    """Chances of 1/2, 1/4, 1/8 and 1/8."""
    from pyspac.train.capture import likeliest

    ids, logs = likeliest(np.log(np.array([[1, 4, 1, 2]], np.float32)), 2)
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(np.exp(logs), [[0.5, 0.25]], rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------
# Learning


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = tmp_path_factory.mktemp("corpus") / "text.py"
    text.write_text((ROOT / "scripts" / "convert_to_gguf.py").read_text() * 12)
    return text


@pytest.fixture
def arguments(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run of seconds, whose head is tmp_path/head.gguf."""
    if not MISSING:
        from pyspac.train import train_head

        monkeypatch.setattr(train_head, "N_HELD_OUT", 4)
    sizes = ["--texts", "16", "-c", "24", "--rows", "2", "-t", "1", "--device", "none"]
    return ["train-head", str(TARGET), "-o", str(tmp_path / "head.gguf"), "-f", str(corpus), *sizes]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def check_drafts(folder: Path, pair: tuple[Path, Path], text: str, *mode: str) -> None:
    """A server drafts with the head, and its text is plain decoding's."""
    drafts = ("--spec-type", "draft-eagle3", "--speculation", "static", "--draft-max", "3")
    with Serve(folder, *drafts, *mode, passed=ONE_THREAD, draft=True, pair=pair) as serve:
        serve.wait_ready(scheduler=not mode)
        body = {"prompt": text, "n_predict": 32, "temperature": 0, "return_tokens": True}
        answer = post(serve.port, "/completion", body | {"ignore_eos": True})
        prompt = post(serve.port, "/tokenize", {"content": text, "add_special": True})
    assert answer["timings"]["draft_n"] > 0
    assert margins(pair[0], prompt["tokens"], answer["tokens"]).max() < NEAR_TIE


class TestHead:
    pytestmark = train

    def test_it_learns_and_goes_on_as_if_never_stopped(
        self, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        from pyspac.train.training import Training

        whole = self.run_to(arguments, tmp_path / "whole", 20)
        losses = whole.pop("losses")
        assert np.mean(losses[-3:]) < 0.8 * losses[0]
        learn = Training.learn

        def learn_and_stop(training: Training) -> float:
            loss = learn(training)
            if training.step == 7:
                training.interrupt()
            return loss

        with monkeypatch.context() as patched:
            patched.setattr(Training, "learn", learn_and_stop)
            stopped = invoke(*arguments, "--steps", "20", "--work-dir", str(tmp_path / "part"))
        assert stopped.exit_code == 130
        assert "the same command trains on" in " ".join(stopped.stderr.split())
        assert torch.load(tmp_path / "part" / "head.pt")["step"] == 7
        part = self.run_to(arguments, tmp_path / "part", 20)
        assert len(part.pop("losses")) == 13
        for name, weight in whole.items():
            assert torch.equal(weight, part[name]), name

    def run_to(self, arguments: list[str], work: Path, n_steps: int) -> dict[str, Any]:
        """The weights, and under `losses` what each step of this run lost."""
        import torch

        from pyspac.train.training import Training

        losses: list[float] = []
        learn = Training.learn
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Training, "learn", lambda training: losses.append(learn(training)) or losses[-1])
            done = invoke(*arguments, "--steps", str(n_steps), "--work-dir", str(work))
        assert done.exit_code == 0, done.output
        return {**torch.load(work / "head.pt")["head"], "losses": losses}

    def test_what_it_says_of_itself(self, arguments: list[str], tmp_path: Path) -> None:
        head = tmp_path / "head.gguf"
        done = invoke(*arguments, "--steps", "2", "--json", "-")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["output"], found["step"], found["interrupted"]) == (str(head), 2, False)
        assert len(found["tokens_per_step"]) == len(found["accepted"]) == 5
        assert found["tokens_per_step"] == sorted(found["tokens_per_step"])
        assert "-md with --spec-type draft-eagle3" in " ".join(invoke("inspect", str(head)).output.split())

    @pytest.mark.parametrize("name", ["gpt-oss", "mixtral"])
    def test_heads_of_other_architectures(self, arguments: list[str], tmp_path: Path, name: str) -> None:
        """Random models; a run with the head is plain decoding's."""
        target, head = gguf_models.write_model(tmp_path / "target.gguf", name), tmp_path / "head.gguf"
        arguments[1] = str(target)
        done = invoke(*arguments, "--steps", "1")
        assert done.exit_code == 0, done.output
        check_drafts(tmp_path, (target, head), "hello world, hello world, hello", "--stock")

    def test_a_server_drafts_with_it(self, arguments: list[str], tmp_path: Path) -> None:
        assert invoke(*arguments, "--steps", "2").exit_code == 0
        check_drafts(tmp_path, (TARGET, tmp_path / "head.gguf"), "import os\n")

    def test_too_little_memory_is_said(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from pyspac.train.train_head import HeadTraining

        monkeypatch.setattr(HeadTraining, "loss", lambda *_: torch.empty(1 << 60))
        failed = invoke(*arguments, "--steps", "1")
        assert failed.exit_code == 1
        assert "can't allocate memory" in failed.stderr
        assert "--rows 2 * 12 tokens; give a smaller --rows" in failed.stderr

    def test_a_full_disk_is_said(self, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        from pyspac.train.captured import Captured

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Captured, "append", fail)
        failed = invoke(*arguments, "--steps", "1")
        assert failed.exit_code == 1
        assert "head.gguf.work: No space left on device; the same command goes on" in failed.stderr

    def test_a_training_that_diverges_keeps_the_checkpoint(
        self, arguments: list[str], tmp_path: Path
    ) -> None:
        assert invoke(*arguments, "--steps", "2").exit_code == 0
        checkpoint = tmp_path / "head.gguf.work" / "head.pt"
        before, head = checkpoint.read_bytes(), (tmp_path / "head.gguf").read_bytes()
        failed = invoke(*arguments, "--steps", "30", "--lr", "1e30")
        assert failed.exit_code == 2
        assert "give a smaller --lr than 1e+30" in failed.stderr
        assert checkpoint.read_bytes() == before
        assert (tmp_path / "head.gguf").read_bytes() == head
        checkpoint.write_bytes(before[:1000])
        cut = invoke(*arguments, "--steps", "30")
        assert (cut.exit_code, "head.pt cannot be read" in cut.stderr) == (2, True)


def test_divergence_by_hand() -> None:
    """Chances of 1/2, 1/4, 1/4 against equal ones: one token apart from the two others together."""
    torch = pytest.importorskip("torch")
    from pyspac.train.head import divergence

    logits, top = torch.zeros(1, 3), torch.tensor([[0]])
    found = divergence(logits, top, torch.log(torch.tensor([[0.5]])))
    assert float(found) == pytest.approx(0.5 * np.log(0.5 * 3) + 0.5 * np.log(0.5 * 3 / 2), rel=1e-5)


def test_layers_that_are_read() -> None:
    pytest.importorskip("torch")
    from pyspac.train.head_file import choose_layers

    assert [choose_layers(n) for n in (1, 3, 6, 48)] == [(0, 0, 0), (0, 1, 2), (1, 3, 5), (2, 24, 45)]


# ---------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.train
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--minutes", "nan"], "--minutes is nan; it must be more than 0"),
        (["--lr", "0"], "--lr is 0; it must be more than 0"),
        (["-c", "8"], "-c is 8; it must be at least 12"),
        (["-c", "9999"], "-c cannot be 9999"),
        (["-f", "no/such/text"], "there is no no/such/text"),
        (["-o", "{model}"], "no head that could be replaced"),
        (["-o", "{folder}/fifo"], "no head that could be replaced"),
        (["--work-dir", "{folder}"], "holds other files"),
        (["--work-dir", "{folder}/notes.txt"], "is no folder"),
        (["--work-dir", "{folder}/no/such"], "cannot be written to"),
        (["--json", "{folder}/no/such.json"], "--json cannot be"),
    ],
)
def test_bad_input(given: list[str], said: str, arguments: list[str], tmp_path: Path) -> None:
    folder, model = tmp_path / "folder", tmp_path / "model.gguf"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    os.mkfifo(folder / "fifo")
    model.write_bytes(TARGET.read_bytes())
    failed = invoke(*arguments, *(text.format(folder=folder, model=model) for text in given))
    assert failed.exit_code == 2, failed.output
    assert said in " ".join(failed.stderr.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "model.gguf"]
    assert model.read_bytes() == TARGET.read_bytes()


@pytest.mark.train
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_model_without_states_is_refused(arguments: list[str], tmp_path: Path) -> None:
    silent = gguf_models.write_model(tmp_path / "silent.gguf", "glm4moe")
    arguments[1] = str(silent)
    failed = invoke(*arguments)
    assert failed.exit_code == 2
    assert "does not hand out for the architecture glm4moe; it does for bailingmoe3" in failed.stderr


def test_what_training_needs_is_said(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PACKAGES", ("json", "no_such_package"))
    failed = invoke(*arguments)
    assert failed.exit_code == 2
    assert "no_such_package is not installed; install the extra `train`" in failed.stderr
