"""scripts/widen_gguf.py: the same text from experts several times as wide; whole files or none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gguf_models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter
from greedy_text import greedy_text
from llama_helpers import Batch, decode, loaded_model, new_context
from serving import TARGET

from pyspac.forward.options import ForwardOptions
from pyspac.forward.runner import Runner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import widen_gguf

MODELS = TARGET.parent
TOKENS = range(5, 25)


def widen(model: Path, out: Path, *options: str) -> int:
    return widen_gguf.main([str(model), str(out), *options])


def logits(path: Path) -> np.ndarray:
    """[n_tokens, n_vocab] of one batch, by stock's kernels."""
    with loaded_model(path) as model, new_context(model) as ctx:
        return decode(ctx, Batch(TOKENS, range(len(TOKENS)), [0] * len(TOKENS)))


def test_the_text_stays(tmp_path: Path) -> None:
    """The demo's, token by token, from experts three times as wide."""
    wide = tmp_path / "wide.gguf"
    assert widen(TARGET, wide, "--times", "3") == 0
    assert wide.stat().st_size > 2.5 * TARGET.stat().st_size
    texts = []
    for path in (TARGET, wide):
        with Runner(ForwardOptions(model=path, stock=True)) as runner:
            texts.append(greedy_text(runner.context, "class Reader:\n    def read(", 48))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("types", [(Type.F16, Type.F32), (Type.Q4_K, Type.Q8_0), (Type.Q5_K, Type.Q5_1)])
def test_logits_stay(types: tuple[Type, ...], tmp_path: Path) -> None:
    """Also beside shared experts, which stay as they are."""
    model = gguf_models.write_model(tmp_path / "model.gguf", "qwen2moe", types)
    assert widen(model, tmp_path / "wide.gguf", "--times", "2") == 0
    np.testing.assert_allclose(logits(tmp_path / "wide.gguf"), logits(model), rtol=1e-3, atol=1e-3)
    before, after = GGUFReader(model), GGUFReader(tmp_path / "wide.gguf")
    shapes = {t.name: tuple(t.shape) for t in before.tensors}
    for tensor in after.tensors:
        is_experts = "_exps" in tensor.name
        assert (tuple(tensor.shape) != shapes[tensor.name]) == is_experts, tensor.name
    assert before.fields.keys() == after.fields.keys()


@pytest.mark.parametrize("name", ["olmoe", "granitemoe", "grok", "nemotron-h-moe"])
def test_whichever_length_an_architecture_reads(name: str, tmp_path: Path) -> None:
    """OLMoE and Granite read that of dense layers, Grok has both kinds, Nemotron-H one for each layer."""
    model = gguf_models.write_model(tmp_path / "model.gguf", name)
    assert widen(model, tmp_path / "wide.gguf", "--times", "2") == 0
    np.testing.assert_allclose(logits(tmp_path / "wide.gguf"), logits(model), rtol=1e-3, atol=1e-3)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    biased = gguf_models.write_model(tmp_path / "gpt-oss.gguf", "gpt-oss")
    shared = gguf_models.write_model(tmp_path / "deepseek3.gguf", "deepseek3")
    dense, text = MODELS / "demo-draft.gguf", tmp_path / "text.gguf"
    text.write_text("not a model")
    out = tmp_path / "out.gguf"
    for model, options, message in (
        (biased, [], "_exps.bias, which this program cannot make wider"),
        (shared, [], "does not say expert_shared_feed_forward_length"),
        (dense, [], "has no experts"),
        (text, [], "GGUF"),
        (tmp_path / "missing.gguf", [], "missing.gguf"),
        (TARGET, ["--times", "1"], "--times 1: give 2 to 256"),
        (TARGET, ["--times", "999"], "--times 999: give 2 to 256"),
    ):
        assert widen(model, out, *options) == 2, message
        assert message in capsys.readouterr().err
        assert not out.exists()
    assert widen(TARGET, tmp_path / "no" / "out.gguf") == 2
    assert "is not a folder" in capsys.readouterr().err
    kept = tmp_path / "kept.gguf"
    kept.write_text("mine")
    assert widen(TARGET, kept) == 2
    assert "overwrite it with --force" in capsys.readouterr().err
    assert kept.read_text() == "mine"
    itself = tmp_path / "itself.gguf"
    itself.write_bytes(TARGET.read_bytes())
    assert widen(itself, itself, "--force") == 2
    assert "is the model itself" in capsys.readouterr().err
    assert itself.read_bytes() == TARGET.read_bytes()


def test_experts_as_wide_as_dense_layers(tmp_path: Path) -> None:
    reader = GGUFReader(gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe"))
    del reader.fields["qwen3moe.expert_feed_forward_length"]
    with pytest.raises(widen_gguf.UsageError, match="does not say expert_feed_forward_length"):
        widen_gguf.check(reader, tmp_path)


def test_what_is_no_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with --force: a device would be gone for all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        assert widen(TARGET, path, "--force", "--times", "2") == 2
        assert "is no file that could be replaced" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_files_beside_it_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "out.gguf.part").symlink_to(other)
    assert widen(TARGET, tmp_path / "out.gguf", "--times", "2") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out.gguf", "out.gguf.part"]
    assert other.read_text() == "mine"


def test_a_models_own_alignment_stays(tmp_path: Path) -> None:
    reader = GGUFReader(gguf_models.write_model(tmp_path / "model.gguf", "qwen3moe", (Type.F16, Type.F32)))
    writer = GGUFWriter(tmp_path / "aligned.gguf", "qwen3moe")
    reader.alignment = 256
    widen_gguf.copy_metadata(reader, writer, 1)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFReader(tmp_path / "aligned.gguf").alignment == 256
    assert widen(tmp_path / "aligned.gguf", tmp_path / "wide.gguf", "--times", "2") == 0
    np.testing.assert_allclose(
        logits(tmp_path / "wide.gguf"), logits(tmp_path / "model.gguf"), rtol=1e-3, atol=1e-3
    )


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(widen_gguf.GGUFWriter, "write_tensors_to_file", write)
    assert widen(TARGET, tmp_path / "out.gguf") == 2
    assert list(tmp_path.iterdir()) == []
