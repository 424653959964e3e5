"""The file of a drafter that was trained into a model: its base, masks and sampler, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind
from gguf import GGUFWriter
from gguf_models import write_model

from pyspac.errors import ModelError
from pyspac.forward.libllama import lib as llama
from pyspac.model import mtp
from pyspac.model.gguf_header import GgufHeader, read_header

MODELS = ROOT / "pyspac" / "models"
TARGET, DRAFT, ADAPTER = (MODELS / f"demo-{name}.gguf" for name in ("moe", "draft", "mtp"))


KINDS = {int: Kind.INT32, float: Kind.FLOAT32, str: Kind.STRING}


def write_adapter(path: Path, **changed: Any) -> Path:
    """An adapter of two masks and four tokens without matrices; `changed` keys are left out where None."""
    halves = np.arange(8, dtype=np.float16).view(np.uint16).tolist()
    keys = {
        "n_masks": (2, Kind.UINT32, None),
        "mask_ids": ([7, 5], Kind.ARRAY, Kind.INT32),
        "base": ("ab", Kind.STRING, None),
        "sampler.rank": (2, Kind.UINT32, None),
        "sampler.top": (3, Kind.UINT32, None),
        "sampler.previous": (halves, Kind.ARRAY, Kind.UINT16),
        "sampler.next": (halves, Kind.ARRAY, Kind.UINT16),
    }
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_type("adapter")
    for name, (value, kind, items) in keys.items():
        if name in changed and (value := changed[name]) is not None:
            kind, items = (
                (Kind.ARRAY, KINDS[type(value[0])]) if isinstance(value, list) else (KINDS[type(value)], None)
            )
        if value is not None:
            writer.add_key_value(f"pyspac.mtp.{name}", value, kind, sub_type=items)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_base_id_is_the_same_in_every_quantisation(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one.gguf", "qwen3moe", types=(Type.Q8_0,))
    other = write_model(tmp_path / "other.gguf", "qwen3moe", types=(Type.Q4_0,), seed=1)
    assert one.read_bytes() != other.read_bytes()
    assert mtp.base_id(one) == mtp.base_id(str(other))


def test_base_id_tells_models_apart(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / f"{name}.gguf", name) for name in ("qwen3moe", "olmoe")]
    ids = {mtp.base_id(path) for path in (*paths, TARGET, DRAFT)}
    assert len(ids) == 4
    assert all(len(one) == 64 for one in ids)


def test_a_file_without_a_vocabulary_has_no_base_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no vocabulary"):
        mtp.base_id(write_adapter(tmp_path / "adapter.gguf"))


def test_an_adapter_is_read(tmp_path: Path) -> None:
    adapter = mtp.read_adapter(write_adapter(tmp_path / "adapter.gguf"))
    assert (adapter.n_masks, adapter.mask_ids, adapter.base) == (2, (7, 5), "ab")
    assert adapter.sampler is not None
    np.testing.assert_array_equal(adapter.sampler.next, np.arange(8).reshape(4, 2))


def test_a_header_does_as_well_as_its_file(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter.gguf")
    model, header = read_header(TARGET), read_header(path)
    path.unlink()
    assert mtp.read_adapter(header).mask_ids == (7, 5)
    assert mtp.base_id(model) == mtp.base_id(TARGET)
    with pytest.raises(ModelError, match=r"adapter\.gguf: this file has no vocabulary"):
        mtp.base_id(header)


def test_an_adapter_without_a_sampler(tmp_path: Path) -> None:
    assert mtp.read_adapter(write_adapter(tmp_path / "a.gguf", **{"sampler.rank": None})).sampler is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n_masks": None}, "no adapter with mask tokens"),
        ({"n_masks": 3}, "an id of its own"),
        ({"n_masks": 0}, "an id of its own"),
        ({"mask_ids": [7, 7]}, "an id of its own"),
        ({"mask_ids": [-1, 7]}, "an id of its own"),
        ({"mask_ids": None}, r"pyspac\.mtp\.mask_ids is missing"),
        ({"base": None}, r"pyspac\.mtp\.base is missing"),
        ({"sampler.rank": 3}, "a sampler of rank 3"),
        ({"sampler.next": [1, 2]}, "cannot have 8 and 2 numbers"),
        ({"sampler.top": 0}, "0 candidates"),
        ({"n_masks": "four"}, "does not hold one whole number"),
        ({"mask_ids": 7}, "does not hold whole numbers"),
        ({"mask_ids": ["7", "8"]}, "does not hold whole numbers"),
        ({"sampler.next": [1.5] * 8}, "does not hold whole numbers"),
        ({"sampler.next": [70000] * 8}, "does not hold 16-bit integers"),
        ({"sampler.next": [0x7C00] * 8}, "does not hold finite numbers"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = write_adapter(tmp_path / "adapter.gguf", **changed)
    with pytest.raises(ModelError, match=said) as error:
        mtp.read_adapter(path)
    assert str(path) in str(error.value)


def test_a_model_is_no_adapter() -> None:
    with pytest.raises(ModelError, match="a model or a head, and --mtp takes an adapter with mask tokens"):
        mtp.read_adapter(TARGET)


def test_the_sampler_prefers_the_pair_that_fits() -> None:
    """Token 2 fits behind token 0; token 3 fits still better, but is no candidate of this mask."""
    scores = np.zeros((5, 1), np.float16)
    scores[2], scores[3] = 2, 9
    before = np.ones((5, 1), np.float16)
    before[1] = 0
    sampler = mtp.MtpSampler(2, before, scores)
    logits = np.array([0, 3, 2, 0, 0], np.float32)
    assert sampler.rerank(logits, 0) == 2
    assert sampler.rerank(logits, 1) == 1
    assert mtp.MtpSampler(99, before, scores).rerank(logits, 0) == 3


# ---------------------------------------------------------------------------------------------------------
# The adapter of the demo's model


def test_the_demo_adapter_belongs_to_the_demo_model() -> None:
    adapter = mtp.read_adapter(ADAPTER)
    assert adapter.base == mtp.base_id(TARGET) != mtp.base_id(DRAFT)
    assert adapter.n_masks == 4
    eos = read_header(TARGET).metadata["tokenizer.ggml.eos_token_id"]
    assert eos not in adapter.mask_ids
    if adapter.sampler is not None:
        assert len(adapter.sampler.next) == len(read_header(TARGET).metadata["tokenizer.ggml.tokens"])


def test_the_demo_adapter_is_small_and_leaves_the_experts_alone() -> None:
    assert ADAPTER.stat().st_size <= 1_000_000
    changed = {tensor.name.split(".lora_")[0] for tensor in read_header(ADAPTER).tensors}
    assert "token_embd.weight" in changed
    assert {name.split(".")[2] for name in changed - {"token_embd.weight"}} == {
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
    }


@pytest.mark.parametrize(("model", "loads"), [(TARGET, True), (DRAFT, False)])
def test_llama_cpp_loads_the_demo_adapter_for_its_model_alone(model: Path, loads: bool) -> None:
    llama.llama_backend_init()
    handle = llama.llama_model_load_from_file(str(model).encode(), llama.llama_model_default_params())
    try:
        assert bool(llama.llama_adapter_lora_init(handle, str(ADAPTER).encode())) == loads
    finally:
        llama.llama_model_free(handle)


def test_a_run_reads_each_header_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 150,000 tokens, and a sampler for it, take a while."""
    read: list[Path] = []

    def counted(path: Path) -> GgufHeader:
        read.append(path)
        return read_header(path)

    monkeypatch.setattr(mtp, "read_header", counted)
    assert mtp.check_adapter(ADAPTER, read_header(TARGET)).n_masks == 4
    assert read == [ADAPTER]
