"""A Hugging Face folder of each model, as llama.cpp's converter reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_demo.common import EOS, N_CTX
from tools.train_demo.ffn import DenseFfn, MoeFfn
from tools.train_demo.model import Model
from tools.train_demo.sizes import ModelConfig
from tools.train_demo.tokenizer import eos_id

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def hf_config(c: ModelConfig, eos_id: int) -> dict[str, object]:
    """`config.json` as Qwen3ForCausalLM or Qwen3MoeForCausalLM reads it."""
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM" if c.n_expert else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if c.n_expert else "qwen3",
        "vocab_size": c.n_vocab,
        "hidden_size": c.n_embd,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_head_kv,
        "head_dim": c.head_dim,
        "intermediate_size": c.n_ff,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": N_CTX,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": eos_id,
        "bos_token_id": eos_id,
    }
    if c.n_expert:
        config |= {
            "num_experts": c.n_expert,
            "num_experts_per_tok": c.n_expert_used,
            "moe_intermediate_size": c.n_ff,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def hf_ffn(ffn: DenseFfn | MoeFfn) -> Iterator[tuple[str, Tensor]]:
    if isinstance(ffn, DenseFfn):
        yield from (("gate_proj", ffn.gate_up[0]), ("up_proj", ffn.gate_up[1]), ("down_proj", ffn.down))
        return
    yield "gate", ffn.router
    for ie in range(ffn.n_expert):
        yield f"experts.{ie}.gate_proj", ffn.gate_up[ie, 0]
        yield f"experts.{ie}.up_proj", ffn.gate_up[ie, 1]
        yield f"experts.{ie}.down_proj", ffn.down[ie]


def hf_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name."""
    yield "model.embed_tokens.weight", model.embd
    yield "model.norm.weight", model.norm
    for il, block in enumerate(model.blocks):
        at, attn = f"model.layers.{il}", block.attn
        yield f"{at}.input_layernorm.weight", block.attn_norm
        yield f"{at}.post_attention_layernorm.weight", block.ffn_norm
        for name in "qkvo":
            yield f"{at}.self_attn.{name}_proj.weight", getattr(attn, name)
        for name in ("q_norm", "k_norm"):
            yield f"{at}.self_attn.{name}.weight", getattr(attn, name)
        for name, weight in hf_ffn(block.ffn):
            yield f"{at}.mlp.{name}.weight", weight


def export_hf(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, model.safetensors (float32) and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().clone().contiguous() for name, p in hf_tensors(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "bos_token": None,
        "unk_token": None,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": N_CTX,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", hf_config(model.c, eos_id(tokenizer))),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
