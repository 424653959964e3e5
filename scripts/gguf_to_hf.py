#!/usr/bin/env python3
"""Write a GGUF as a Hugging Face folder: its weights as they are after quantisation, in float32.

    MODEL.gguf -> config.json, model.safetensors, tokenizer.json

For training on a model whose folder is not at hand, and for training against the very weights that will run.
It knows `qwen3moe`, the architecture of the demo's model; of other models use the folder that they came from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from pyspac.errors import ModelError
from pyspac.model.checks import check_model_file
from pyspac.model.gguf_header import GgufHeader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tools/
from pyspac.train.packages import missing_packages
from tools.train_demo.split import QWEN2_SPLIT

PACKAGES: Final = ("safetensors", "tokenizers")
ARCHITECTURE: Final = "qwen3moe"
# a GGUF tensor's name without "blk.N." -> the same in the folder, without "model.layers.N."
LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """`config.json` as Qwen3MoeForCausalLM reads it."""
    get, vocab = header.get, header.metadata["tokenizer.ggml.tokens"]
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": len(vocab),
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "intermediate_size": get("feed_forward_length", get("expert_feed_forward_length")),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in header.tensors),
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
    }


def hf_tensors(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every weight under its name in the folder; an expert's projections are tensors of their own there."""
    for tensor in GGUFReader(path).tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if not name.startswith("blk."):
            yield f"{TOP_NAMES[name]}.weight", weight
            continue
        _, il, name = name.split(".")
        at = f"model.layers.{il}"
        if name.endswith("_exps"):
            for ie, one in enumerate(weight):
                yield f"{at}.mlp.experts.{ie}.{LAYER_NAMES[name]}.weight", np.ascontiguousarray(one)
        else:
            yield f"{at}.{LAYER_NAMES[name]}.weight", weight


def tokenizer(header: GgufHeader) -> Any:
    """The byte-level BPE of the file, split as llama.cpp's "qwen2" splits."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = header.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in header.metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    made.decoder = decoders.ByteLevel()
    types = header.metadata["tokenizer.ggml.token_type"]
    made.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    return made


def write_folder(path: Path, folder: Path) -> None:
    """Raises ModelError for a file that cannot be read, and for another architecture."""
    from safetensors.numpy import save_file

    header = check_model_file(path)
    pre = header.metadata.get("tokenizer.ggml.pre")
    if header.architecture != ARCHITECTURE or pre != "qwen2":
        raise ModelError(
            f"{path}: the architecture is {header.architecture!r} and the pre-tokenizer {pre!r}, and "
            f"gguf_to_hf knows {ARCHITECTURE!r} with 'qwen2'; use the folder that the model came from"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(hf_tensors(path)), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(header).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(hf_config(header), indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 written, 2 something given cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""example:
  python scripts/gguf_to_hf.py pyspac/models/demo-moe.gguf build/demo-hf
exit codes: 0 done, 2 something given cannot be used (the message says what)""",
    )
    parser.add_argument("model", type=Path, help="GGUF of a model, quantised or not")
    parser.add_argument("folder", type=Path, help="folder to write; files of the same names are replaced")
    args = parser.parse_args(argv)
    try:
        if missing := missing_packages(PACKAGES):
            raise ModelError(missing)
        write_folder(args.model, args.folder)
    except ModelError as error:
        print(f"gguf_to_hf: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gguf_to_hf: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
