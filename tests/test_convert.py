"""scripts/convert_to_gguf.py: a random tiny Hugging Face folder in, a checked GGUF out; clear errors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pyspac.train.packages import missing_packages

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "convert_to_gguf.py"
N_VOCAB, N_EMBD, N_FF, N_EXPERT, HEAD_DIM = 512, 256, 256, 4, 64
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_script():
    spec = importlib.util.spec_from_file_location("convert_to_gguf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


convert_to_gguf = load_script()


def missing_for_conversion() -> str:
    """Why a real conversion cannot run here; empty when it can."""
    needed = ("torch", "transformers", "tokenizers", "safetensors")
    if missing := missing_packages(needed):
        return missing
    try:
        convert_to_gguf.find_quantizer(convert_to_gguf.find_bin_dir(None))
        convert_to_gguf.find_converter(None)
    except convert_to_gguf.UserError as error:
        return str(error)
    return ""


WHY_NOT = missing_for_conversion()
needs_converter = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def byte_tokenizer() -> dict[str, object]:
    """tokenizer.json of 256 bytes and a few merges, split as qwen2 splits: so "12" stays two tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [["e", "r"], ["i", "n"], ["Ġ", "t"], ["1", "2"], ["in", "g"]]
    tokens = [*alphabet, *("".join(m) for m in merges), "<|endoftext|>"]
    steps = [
        {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    end = {
        "id": len(tokens) - 1,
        "content": tokens[-1],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens[:-1])}, "merges": merges},
    }


def random_weights() -> dict[str, np.ndarray]:
    """One qwen3moe layer, float32, [n_out, n_in]."""
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    at = "model.layers.0"
    tensors = {"model.embed_tokens.weight": weight(N_VOCAB, N_EMBD)}
    tensors[f"{at}.mlp.gate.weight"] = weight(N_EXPERT, N_EMBD)
    for name in ("model.norm", f"{at}.input_layernorm", f"{at}.post_attention_layernorm"):
        tensors[f"{name}.weight"] = np.ones(N_EMBD, np.float32)
    for name in "qkvo":
        tensors[f"{at}.self_attn.{name}_proj.weight"] = weight(4 * HEAD_DIM, N_EMBD)
    for name in "qk":
        tensors[f"{at}.self_attn.{name}_norm.weight"] = np.ones(HEAD_DIM, np.float32)
    for ie in range(N_EXPERT):
        for name, shape in (("gate", (N_FF, N_EMBD)), ("up", (N_FF, N_EMBD)), ("down", (N_EMBD, N_FF))):
            tensors[f"{at}.mlp.experts.{ie}.{name}_proj.weight"] = weight(*shape)
    return tensors


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("hf") / "tiny-moe"
    folder.mkdir()
    save_file(random_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = byte_tokenizer()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": N_VOCAB,
        "hidden_size": N_EMBD,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": HEAD_DIM,
        "intermediate_size": N_FF,
        "moe_intermediate_size": N_FF,
        "num_experts": N_EXPERT,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": tokenizer["added_tokens"][0]["id"],
    }
    extra = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", extra)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def run_script(*argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.train
@needs_converter
def test_random_folder_becomes_a_checked_gguf(hf_folder: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    out = tmp_path / "tiny.gguf"
    done = run_script(hf_folder, out, "--quant", "Q4_K_M", "--tensor-type", "ffn_down_exps=q8_0")
    assert done.returncode == 0, done.stderr
    assert "it goes on: " in done.stdout
    reader = GGUFReader(out)
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert reader.get_field("general.architecture").contents() == "qwen3moe"
    assert reader.get_field("tokenizer.ggml.pre").contents() == "qwen2"
    assert types["blk.0.ffn_up_exps.weight"] == "Q4_K"
    assert types["blk.0.ffn_down_exps.weight"] == "Q8_0"
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.train
@needs_converter
def test_failure_leaves_the_old_file(hf_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.gguf"
    out.write_bytes(b"old")
    done = run_script(hf_folder, out, "--quant", "Q99")
    assert done.returncode == 2
    assert "could not make Q99" in done.stderr
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.train
@needs_converter
def test_wrong_pre_tokenizer_is_caught(hf_folder: Path, tmp_path: Path) -> None:
    done = run_script(hf_folder, tmp_path / "tiny.gguf", "--quant", "F16", "--pre", "gpt-2")
    assert done.returncode == 2
    assert "splits text differently" in done.stderr


def bad_folders(tmp_path: Path) -> list[tuple[Path, str]]:
    """(folder, what the message must say)."""
    names = ("empty", "nameless", "weightless", "broken")
    empty, nameless, weightless, broken = (tmp_path / name for name in names)
    for folder, config in (
        (empty, None),
        (nameless, "{}"),
        (broken, "{"),
        (weightless, '{"architectures": ["Qwen3ForCausalLM"]}'),
    ):
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_text(config)
    return [
        (tmp_path / "absent", "not a folder"),
        (empty, "no config.json"),
        (nameless, "names no architecture"),
        (weightless, "no *.safetensors"),
        (broken, "is not JSON"),
    ]


def test_bad_folders_end_with_2_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, words in bad_folders(tmp_path):
        assert convert_to_gguf.main([str(folder), str(tmp_path / "out.gguf")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


def test_missing_trees_name_the_option(tmp_path: Path) -> None:
    for find, option in (
        (convert_to_gguf.find_converter, "--llama-cpp DIR"),
        (convert_to_gguf.find_bin_dir, "--bin-dir DIR"),
        (convert_to_gguf.find_quantizer, "--bin-dir DIR"),
    ):
        with pytest.raises(convert_to_gguf.UserError, match=option):
            find(tmp_path)


def test_pre_tokenizer_is_known_by_its_regular_expression(tmp_path: Path) -> None:
    step = {"type": "Split", "pattern": {"Regex": SPLIT}}
    cases = [
        ({"type": "Sequence", "pretokenizers": [step, {"type": "ByteLevel"}]}, "qwen2"),
        (step, "qwen2"),
        ({"type": "Split", "pattern": {"Regex": r"\w+"}}, None),
        ({"type": "ByteLevel"}, None),
        (None, None),
    ]
    for pre, expected in cases:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": pre}))
        assert convert_to_gguf.find_pre_tokenizer(tmp_path) == expected


def test_fallback_answers_only_where_the_converter_cannot() -> None:
    def knows(_model: object, _tokenizer: object) -> str:
        return "llama-bpe"

    def knows_nothing(_model: object, _tokenizer: object) -> str:
        raise NotImplementedError

    assert convert_to_gguf.with_fallback(knows, "qwen2")(None, None) == "llama-bpe"
    assert convert_to_gguf.with_fallback(knows_nothing, "qwen2")(None, None) == "qwen2"
    with pytest.raises(NotImplementedError, match="--pre NAME"):
        convert_to_gguf.with_fallback(knows_nothing, None)(None, None)
