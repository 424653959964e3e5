"""pyspac.model against what gguf_models.py wrote and the gguf package reads."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf_models
import input_models
import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from pyspac.errors import ModelError
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import GgufHeader, TensorInfo, read_header


def geometry_of(path: Path) -> MoeGeometry:
    return read_geometry(read_header(path))


def test_qwen3moe_by_hand(tmp_path: Path) -> None:
    """16 experts of three 256 x 256 matrices in each of 3 layers, whose types are repeated from MIXED_TYPES.

    Q8_0: 34 bytes per 32 weights; Q4_K: 144 per 256; Q6_K: 210 per 256; Q4_0: 18 per 32.
    """
    g = geometry_of(gguf_models.write_model(tmp_path / "m.gguf", "qwen3moe"))
    n = 256 * 256
    assert [layer.expert_bytes for layer in g.layers] == [
        3 * n // 32 * 34,
        2 * n // 256 * 144 + n // 256 * 210,
        3 * n // 32 * 18,
    ]
    assert [layer.layout for layer in g.layers] == [
        "gate,up,down=Q8_0",
        "gate,up=Q4_K down=Q6_K",
        "gate,up,down=Q4_0",
    ]
    assert (g.n_layer, g.n_moe_layer, g.n_expert, g.n_expert_used, g.n_leading_dense) == (3, 3, 16, 4, 0)
    assert (g.architecture, g.n_embd, g.n_ctx_train, g.n_expert_shared) == ("qwen3moe", 256, 512, 0)
    assert g.experts_bytes == 16 * sum(layer.expert_bytes for layer in g.layers)


@pytest.mark.parametrize("name", gguf_models.ARCHITECTURES)
def test_every_architecture(name: str, tmp_path: Path) -> None:
    """Layers, experts and bytes as the gguf package sees them."""
    path = gguf_models.write_model(tmp_path / "m.gguf", name)
    g = geometry_of(path)
    architecture = gguf_models.ARCHITECTURES[name]
    assert [layer.il for layer in g.moe_layers] == architecture.moe_layers()
    assert g.n_expert == architecture.shape.n_expert
    assert g.n_expert_used == architecture.shape.n_expert_used
    tensors = GGUFReader(path).tensors
    assert g.model_bytes == sum(tensor.n_bytes for tensor in tensors)
    assert g.experts_bytes == sum(int(tensor.n_bytes) for tensor in tensors if "_exps." in tensor.name)
    assert any(layer.shared_bytes for layer in g.layers) == any("_shexp.weight" in t.name for t in tensors)


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = gguf_models.write_model(tmp_path / "m.gguf", "deepseek3")
    header, reader = read_header(path), GGUFReader(path)
    assert {t.name: (t.type_name, t.n_bytes, t.offset, t.shape) for t in header.tensors} == {
        t.name: (t.tensor_type.name, t.n_bytes, t.data_offset, tuple(t.shape.tolist()))
        for t in reader.tensors
    }
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields


def test_leading_dense_and_shared(tmp_path: Path) -> None:
    g = geometry_of(gguf_models.write_model(tmp_path / "m.gguf", "deepseek"))
    assert (g.n_leading_dense, g.n_moe_layer, g.n_expert_shared) == (1, 2, 2)
    assert not g.layers[0].is_moe
    assert g.layers[1].shared_bytes > 0


def test_dense_model(tmp_path: Path) -> None:
    g = geometry_of(input_models.write_dense(tmp_path / "m.gguf"))
    assert not g.is_moe
    assert (g.n_expert, g.n_experts_total, g.experts_bytes, g.n_experts_in(1e12)) == (0, 0, 0, 0)


def test_how_many_experts_fit(tmp_path: Path) -> None:
    g = geometry_of(gguf_models.write_model(tmp_path / "m.gguf", "qwen3moe"))
    assert g.n_experts_in(0) == 0
    assert g.n_experts_in(g.experts_bytes / 2) == 24
    assert g.n_experts_in(g.experts_bytes * 9) == g.n_experts_total == 48
    assert g.to_dict()["layers"][1]["quantisation"] == {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}


def test_split_model(tmp_path: Path) -> None:
    """A model in two files counts as one; only the first file can be given."""
    whole = geometry_of(gguf_models.write_model(tmp_path / "whole.gguf", "qwen3moe"))
    first, second = input_models.write_split(tmp_path, "qwen3moe")
    assert geometry_of(first).layers == whole.layers
    assert {tensor.path for tensor in read_header(first).tensors} == {first, second}
    with pytest.raises(Exception, match="not the first"):
        read_header(second)


def write_damaged(path: Path, key: str, value: object) -> Path:
    """The header of a file with one matrix."""
    writer = GGUFWriter(path, "qwen3moe")
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kind = {str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32, int: GGUFValueType.UINT32}[
            type(value)
        ]
        writer.add_key_value(key, value, kind)
    writer.add_tensor("output.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("key", ["general.alignment", "split.count", "qwen3moe.attention.kv_lora_rank"])
@pytest.mark.parametrize("value", ["many", 1.5, float("nan"), [1.5]])
def test_a_size_that_is_no_number(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{key} cannot be"):
        check_model_file(write_damaged(tmp_path / "model.gguf", key, value))


@pytest.mark.parametrize(("key", "value"), [("general.alignment", 0), ("split.count", 0)])
def test_a_size_that_is_0(key: str, value: int, tmp_path: Path) -> None:
    assert check_model_file(write_damaged(tmp_path / "model.gguf", key, value)).tensors


def test_more_layers_than_llama_cpp_knows(tmp_path: Path) -> None:
    """They would be gone through one by one."""
    path = write_damaged(tmp_path / "model.gguf", "qwen3moe.block_count", (1 << 32) - 1)
    with pytest.raises(ModelError, match="block_count cannot be 4294967295"):
        check_model_file(path)
    name = TensorInfo("blk.4294967295.ffn_up_exps.weight", "F32", (32, 2, 2), 512, 0, path)
    assert not read_geometry(GgufHeader(path, {}, (name,))).is_moe


def test_arrays_within_arrays(tmp_path: Path) -> None:
    """Which no writer makes, and each of which would take a call of its own."""
    entry = struct.pack("<Q1sI", 1, b"x", GGUFValueType.ARRAY)
    nested = struct.pack("<IQ", GGUFValueType.ARRAY, 1) * 5000 + struct.pack("<IQ", GGUFValueType.UINT8, 0)
    (path := tmp_path / "model.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry + nested)
    with pytest.raises(ModelError, match="arrays within arrays"):
        read_header(path)
