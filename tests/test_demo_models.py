"""The committed demo pair: sizes, architectures, one vocabulary; and the trainer's pieces where torch is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from gguf import GGUFReader

from pyspac.train.corpus import Module
from pyspac.train.packages import missing_packages
from tools.train_demo import __main__ as trainer

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "pyspac" / "models"
TARGET, DRAFT = MODELS / "demo-moe.gguf", MODELS / "demo-draft.gguf"
MAX_BYTES = {TARGET: 16_000_000, DRAFT: 2_000_000}


def value(reader: GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    assert field is not None, f"no {key}"
    return field.contents()


@pytest.fixture(scope="module")
def target() -> GGUFReader:
    return GGUFReader(TARGET)


@pytest.fixture(scope="module")
def draft() -> GGUFReader:
    return GGUFReader(DRAFT)


@pytest.mark.parametrize("path", MAX_BYTES, ids=lambda path: path.name)
def test_size(path: Path) -> None:
    assert path.stat().st_size <= MAX_BYTES[path]


def test_target_is_a_mixture_worth_caching(target: GGUFReader) -> None:
    assert value(target, "general.architecture") == "qwen3moe"
    assert value(target, "qwen3moe.block_count") >= 6
    assert value(target, "qwen3moe.expert_count") >= 32
    assert value(target, "qwen3moe.expert_used_count") == 4


def test_draft_is_dense(draft: GGUFReader) -> None:
    assert value(draft, "general.architecture") == "qwen3"
    assert not [t.name for t in draft.tensors if "exps" in t.name]


def test_expert_tensors_are_stacked_and_quantised(target: GGUFReader) -> None:
    n_expert = value(target, "qwen3moe.expert_count")
    experts = [t for t in target.tensors if "_exps" in t.name]
    assert len(experts) == 3 * value(target, "qwen3moe.block_count")
    for tensor in experts:
        assert tensor.shape[-1] == n_expert
        assert tensor.tensor_type.name.startswith(("Q", "IQ"))


def test_one_vocabulary(target: GGUFReader, draft: GGUFReader) -> None:
    keys = [key for key in target.fields if key.startswith("tokenizer.")]
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template"} <= set(keys)
    assert keys == [key for key in draft.fields if key.startswith("tokenizer.")]
    for key in keys:
        assert value(target, key) == value(draft, key), key


def test_vocabulary_is_what_llama_cpp_expects(target: GGUFReader) -> None:
    tokens = value(target, "tokenizer.ggml.tokens")
    assert value(target, "tokenizer.ggml.model") == "gpt2"
    assert value(target, "tokenizer.ggml.pre") == "qwen2"
    assert tokens[value(target, "tokenizer.ggml.eos_token_id")] == "<|endoftext|>"
    assert len(set(tokens)) == len(tokens)


def test_same_context(target: GGUFReader, draft: GGUFReader) -> None:
    assert value(target, "qwen3moe.context_length") == value(draft, "qwen3.context_length")


def test_model_card_names_both() -> None:
    card = (MODELS / "README.md").read_text()
    assert TARGET.name in card
    assert DRAFT.name in card


# ---------------------------------------------------------------------------------------------------------
# The trainer's pieces

MISSING = missing_packages(trainer.PACKAGES)
needs_train = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.train
@needs_train
def test_acceptance_length_by_hand() -> None:
    """right right wrong right | with 4 drafted: a step of 3 tokens, then one cut off after 1."""
    from tools.train_demo.held_out import acceptance_length

    assert acceptance_length([True, True, False, True], 4) == 2
    assert acceptance_length([False] * 6, 4) == 1
    assert acceptance_length([True] * 10, 4) == 5
    assert acceptance_length([True] * 10, 1) == 2


@pytest.mark.train
@needs_train
def test_learning_rate_warms_up_stays_and_falls() -> None:
    from tools.train_demo.optimiser import OptimConfig, lr_factor

    optim = OptimConfig()
    factors = [lr_factor(optim, x) for x in (0, optim.warmup / 2, 0.1, optim.decay_from, 1)]
    assert factors == pytest.approx([0, 0.5, 1, 1, 0], abs=1e-3)


def test_what_training_needs_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "PACKAGES", ("json", "no_such_package"))
    assert trainer.main([]) == 2
    assert "no_such_package is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("json",), ""),
        (("json", "no_a"), "no_a is not installed; "),
        (("no_a", "no_b", "json", "no_c"), "no_a, no_b and no_c are not installed; "),
    ],
)
def test_missing_packages_are_a_sentence(names: tuple[str, ...], said: str) -> None:
    how = "install the extra `train`, in a clone: pip install -e '.[train]'" if said else ""
    assert missing_packages(names) == said + how


def test_held_out_modules_are_a_fixed_few() -> None:
    names = [f"package/module_{i}.py" for i in range(2000)]
    held_out = [name for name in names if Module(name, "").is_held_out]
    assert held_out == [name for name in names if Module(name, "other text").is_held_out]
    assert 0.03 < len(held_out) / len(names) < 0.07


@pytest.mark.train
@needs_train
def test_windows_cover_an_epoch_without_overlap() -> None:
    import torch

    from tools.train_demo.common import N_CTX
    from tools.train_demo.data import Windows

    windows = Windows(torch.arange(10 * N_CTX), seed=1)
    starts = sorted(int(windows(k)[0]) for k in range(windows.n_per_epoch))
    assert len(windows(0)) == N_CTX + 1
    assert {b - a for a, b in itertools.pairwise(starts)} == {N_CTX}


@pytest.mark.train
@needs_train
def test_grouped_linear_equals_one_matrix_per_expert() -> None:
    """Forward and both gradients against plain torch, float32."""
    import torch

    from tools.train_demo.ffn import GroupedLinear

    torch.manual_seed(0)
    bounds, x, w = (
        [0, 3, 3, 7],
        torch.randn(7, 4, requires_grad=True),
        torch.randn(3, 5, 4, requires_grad=True),
    )
    rows = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    expected = torch.einsum("ri,roi->ro", x, w[rows])
    grads = torch.autograd.grad(expected.square().sum(), (x, w))
    seen = GroupedLinear.apply(x, w, bounds)
    torch.testing.assert_close(seen, expected)
    torch.testing.assert_close(torch.autograd.grad(seen.square().sum(), (x, w)), grads)


@pytest.mark.train
@needs_train
def test_pair_loss_gradients_equal_autograd() -> None:
    """The hand-written gradients against those of the losses written out, float32."""
    import torch
    import torch.nn.functional as F

    from tools.train_demo.distillation import PairLoss

    torch.manual_seed(0)
    p, q = (torch.randn(6, 11, requires_grad=True) for _ in range(2))
    labels, share = torch.randint(11, (6,)), 0.7
    teacher = F.softmax(p.detach(), -1)
    blend = share * teacher + (1 - share) * F.one_hot(labels, 11)
    loss = F.cross_entropy(p, labels) - (blend * F.log_softmax(q, -1)).sum(-1).mean()
    expected = torch.autograd.grad(loss, (p, q))
    main, report = PairLoss.apply(p, q, labels, share)
    torch.testing.assert_close(torch.autograd.grad(main, (p, q)), expected)
    torch.testing.assert_close(report[0], F.cross_entropy(p, labels).detach())


@pytest.mark.train
@needs_train
def test_tokenizer_keeps_every_byte() -> None:
    from tools.train_demo.common import EOS
    from tools.train_demo.tokenizer import train_tokenizer

    texts = ["def f(x):\n    return x + 12\n" * 50, "class A:\n\tpass\n" * 50]
    tokenizer = train_tokenizer(texts, 280)
    text = "def g(ä):\r\n\treturn '12' \n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id(EOS) == 279
