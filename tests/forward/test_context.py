"""pyspac.forward.context on a tiny model: text, batches, rollback, limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import input_models
import numpy as np
import pytest

from pyspac.errors import ModelError
from pyspac.forward import libllama
from pyspac.forward.context import Context, ContextFullError, ContextParams
from pyspac.forward.model import Model, ModelParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = input_models.write_target(tmp_path_factory.mktemp("models") / "target.gguf")
    with Model(ModelParams(path=path, use_extra_bufts=False)) as model:
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    params = ContextParams(n_ctx=64, n_ubatch=16, n_outputs_max=16, n_rollback_max=15)
    with Context(model, params) as context:
        yield context


TOKENS = list(range(3, 40))


# ---- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "hello", "naïve漢字🦙" * 50])
def test_text_is_bytes(model: Model, text: str) -> None:
    tokens = model.vocab.tokenize(text)
    assert tokens == [1, *(3 + byte for byte in text.encode())]  # BOS, then byte b is token 3 + b


def test_more_tokens_than_bytes(model: Model) -> None:
    """This vocabulary has no space: the tokeniser makes it U+2581, three bytes."""
    assert len(model.vocab.tokenize(" " * 100, add_special=False)) == 300


def test_ends(model: Model) -> None:
    assert model.vocab.n_tokens == 259
    assert model.vocab.is_eog(2)
    assert not model.vocab.is_eog(100)


# ---- loading -------------------------------------------------------------------------------------


def test_progress_is_reported_and_can_stop(model: Model) -> None:
    seen: list[float] = []
    with Model(ModelParams(path=model.path), lambda x: seen.append(x) is None):
        assert seen[-1] == 1.0
        assert seen == sorted(seen)
    with pytest.raises(KeyboardInterrupt):
        Model(ModelParams(path=model.path), lambda x: False)


def test_llama_cpps_own_reason_is_in_the_message(tmp_path: Path) -> None:
    """A whole file whose tensors are not those of its architecture."""
    path = input_models.write_incomplete(tmp_path / "incomplete.gguf")
    with pytest.raises(ModelError, match=r"incomplete\.gguf: llama\.cpp cannot load.*tensor 'blk\.2\."):
        Model(ModelParams(path=path))


def test_close_may_be_called_twice(model: Model) -> None:
    context = Context(model, ContextParams(n_ctx=32))
    context.close()
    context.close()


# ---- decoding ------------------------------------------------------------------------------------


def test_outputs_are_the_last_tokens(context: Context) -> None:
    """One batch with all logits, and the same tokens one by one: equal up to the kernels' rounding."""
    rows = context.decode(TOKENS[:8], 8).copy()
    assert rows.shape == (8, 259)
    context.clear()
    for token, row in zip(TOKENS[:8], rows, strict=True):
        np.testing.assert_allclose(context.decode([token], 1)[0], row, rtol=1e-3, atol=1e-3)


def test_same_width_is_bit_identical_after_rollback(context: Context) -> None:
    context.decode(TOKENS[:10], 0)
    first = context.decode(TOKENS[10:14], 4).copy()
    context.rollback(10)
    assert np.array_equal(context.decode(TOKENS[10:14], 4), first)


def test_rollback_forgets(context: Context) -> None:
    context.decode(TOKENS[:10], 0)
    expected = context.decode([7], 1).copy()
    context.rollback(10)
    context.decode([30, 31, 32, 33], 4)
    context.rollback(10)
    assert context.n_past == 10
    assert np.array_equal(context.decode([7], 1), expected)


def test_a_decode_that_was_broken_off_is_taken_back(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C is raised as llama_decode returns: the memory holds more than anyone knows of."""
    context.decode(TOKENS[:10], 0)
    expected = context.decode([7], 1).copy()
    context.rollback(10)
    real = libllama.lib.llama_decode

    def broken_off(*args: object) -> int:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(libllama.lib, "llama_decode", broken_off)
    with pytest.raises(KeyboardInterrupt):
        context.decode([30, 31, 32], 1)
    monkeypatch.undo()
    assert context.n_past == 10
    assert np.array_equal(context.decode([7], 1), expected)


def test_long_prompt_in_pieces(context: Context) -> None:
    """37 tokens in pieces of 16, 16 and 5, by one call or by three."""
    whole = context.decode(TOKENS, 1).copy()
    context.clear()
    for first in range(0, len(TOKENS), 16):
        pieces = context.decode(TOKENS[first : first + 16], 1)
    assert np.array_equal(pieces, whole)
    context.clear()
    assert context.decode(TOKENS, 12).shape == (12, 259)
    assert context.n_past == len(TOKENS)


def test_no_outputs(context: Context) -> None:
    assert context.decode(TOKENS[:4], 0).shape == (0, 259)


def test_full_context(context: Context) -> None:
    context.decode([5] * 60, 0)
    with pytest.raises(ContextFullError, match=r"60 tokens are in it and 5 more.*n_ctx = 64; raise -c"):
        context.decode([5] * 5, 0)
    assert context.n_past == 60
    context.decode([5] * 4, 0)


def test_contexts_of_one_model_are_independent(model: Model, context: Context) -> None:
    with Context(model, ContextParams(n_ctx=64, n_ubatch=16)) as other:
        expected = context.decode(TOKENS[:6], 1).copy()
        other.decode(TOKENS[6:12], 1)
        context.clear()
        assert np.array_equal(context.decode(TOKENS[:6], 1), expected)


def test_recurrent_model_that_cannot_take_back(tmp_path: Path) -> None:
    path = input_models.write_target(tmp_path / "recurrent.gguf", "qwen3next")
    with Model(ModelParams(path=path)) as model:
        with pytest.raises(ModelError, match=r"cannot take back.*without drafts"):
            Context(model, ContextParams(n_ctx=64, n_outputs_max=5, n_rollback_max=4))
        Context(model, ContextParams(n_ctx=64)).close()


def test_recurrent_model_that_can_take_back(tmp_path: Path) -> None:
    path = input_models.write_target(tmp_path / "recurrent.gguf", "nemotron-h-moe")
    params = ContextParams(n_ctx=64, n_outputs_max=5, n_rollback_max=4)
    with Model(ModelParams(path=path)) as model, Context(model, params) as context:
        context.decode(TOKENS[:10], 0)
        context.decode([7, 30, 31, 32, 33], 5)
        context.rollback(11)
        after = context.decode([8], 1)[0].copy()
        context.clear()
        context.decode([*TOKENS[:10], 7], 0)
        np.testing.assert_allclose(context.decode([8], 1)[0], after, rtol=1e-3, atol=1e-3)
