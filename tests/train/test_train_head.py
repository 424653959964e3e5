"""Heads trained from a GGUF alone: what is captured, what is computed, what is learned, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from near_ties import NEAR_TIE, margins

from pyspac.commands import train_head as command
from pyspac.commands.demo import TARGET
from pyspac.errors import EngineError, UsageError
from pyspac.generate.hidden_states import HiddenStates
from pyspac.generate.llama import Context, ContextParams, Model, ModelParams
from pyspac.generate.options import RunOptions
from pyspac.generate.session import Session
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

    options = RunOptions(model=TARGET, n_ctx=16, n_sequences=capture.N_TEXTS, n_threads=1, device="none")
    captured = Captured(folder, about())
    with Session(options) as session:
        capture.write(session, captured, prompts, greedy=greedy)
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
