"""Synthetic models: sizes as asked for, routing as local as in published traces, whole files or none."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import make_synthetic_gguf as synthetic

SMALL = ["--layers", "2", "--experts", "8", "--vocab", "512"]


def routing(n_expert: int, n_used: int) -> np.ndarray:
    """Chosen experts of tokens in order of their ids, by random routers: [n_layer, n_tokens, n_used]."""
    n_layer, n_tokens, n_embd = 6, 600, 1024
    rng = np.random.default_rng(1)
    embeddings = synthetic.token_embeddings(rng, n_tokens, n_embd)
    logits = np.einsum("te,lxe->ltx", embeddings, rng.standard_normal((n_layer, n_expert, n_embd)))
    return np.argsort(-logits, axis=-1)[..., :n_used]


def union_ratio(chosen: np.ndarray, width: int) -> float:
    """Distinct experts of `width` tokens in a row, as a multiple of one token's."""
    n_layer, n_tokens, n_used = chosen.shape
    windows = chosen[:, : n_tokens // width * width].reshape(n_layer, -1, width * n_used)
    return float(np.mean([len(set(window)) for layer in windows for window in layer]) / n_used)


def test_routing_is_as_local_as_in_traces() -> None:
    chosen = routing(n_expert=128, n_used=8)
    assert 2 - union_ratio(chosen, 2) == pytest.approx(0.38, abs=0.04)  # overlap of neighbours
    assert union_ratio(chosen, 9) == pytest.approx(4.2, abs=0.3)


def test_random_order_is_less_local() -> None:
    chosen = np.random.default_rng(2).permutation(routing(n_expert=128, n_used=8), axis=1)
    assert 2 - union_ratio(chosen, 2) < 0.30


def test_greedy_continuation_is_the_next_token() -> None:
    embeddings = synthetic.token_embeddings(np.random.default_rng(3), 400, 512)
    best = np.argmax(embeddings @ synthetic.output_head(embeddings).T, axis=1)
    assert (best[synthetic.N_RESERVED : -1] == np.arange(synthetic.N_RESERVED + 1, 400)).all()
    assert best[-1] == synthetic.N_RESERVED  # never a control token


def test_file_has_the_geometry_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert synthetic.main([str(path), *SMALL, "--type", "iq4_xs"]) == 0
    reader = GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    experts = tensors["blk.1.ffn_up_exps.weight"]
    assert experts.shape.tolist() == [1024, 512, 8]
    assert experts.tensor_type == Type.IQ4_XS
    assert "blk.2.ffn_up_exps.weight" not in tensors
    assert reader.fields["qwen3moe.expert_count"].contents() == 8
    assert list(tmp_path.iterdir()) == [path]  # no temporary file


def test_same_seed_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    for path, seed in zip(paths, ("1", "1", "2"), strict=True):
        assert synthetic.main([str(path), *SMALL, "--layers", "1", "--seed", seed]) == 0
    a, b, c = (path.read_bytes() for path in paths)
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--like", "qwen9"], "Known: small"),
        (["--layers", "0"], "at least 1"),
        (["--experts", "4"], "must be 8"),
        (["--type", "Q9_K"], "Fitting: F32"),
        (["--like", "gpt-oss-20b", "--type", "Q4_K"], "Fitting:"),  # rows of 2880 are no multiple of 256
        (["--vocab", "100"], "259"),
    ],
)
def test_wrong_values_are_explained(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert synthetic.main([str(tmp_path / "model.gguf"), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("mine")
    assert synthetic.main([str(path), *SMALL]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(n_bytes: int) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "model.gguf"
    with pytest.raises(KeyboardInterrupt):
        synthetic.write_gguf(path, "name", synthetic.GEOMETRIES["small"], 512, 0, interrupt)
    assert list(tmp_path.iterdir()) == []
