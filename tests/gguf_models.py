"""Tiny MoE models with random weights: an architecture and its expert types in, a GGUF file of a few MB out.

Each entry of ARCHITECTURES writes the metadata and tensors that llama.cpp's loader of that architecture asks
for (llama.cpp, src/models/<architecture>.cpp). The vocabulary is only llama's byte fallback: 3 control and
256 byte tokens, so that any text can be tokenised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from random_blocks import random_blocks

N_VOCAB = 259
ExpertTypes = Type | tuple[Type, Type, Type]  # one type, or those of (gate, up, down)
MIXED_TYPES: tuple[ExpertTypes, ...] = (Type.Q8_0, (Type.Q4_K, Type.Q4_K, Type.Q6_K), Type.Q4_0)

_SIGMOID = 2  # {arch}.expert_gating_func


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a tiny model. 256 is one K-quant block, so the smallest row that every type fits."""

    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 256
    n_ff_exp: int = 256
    n_expert: int = 8
    n_expert_used: int = 2

    @property
    def n_head_dim(self) -> int:
        return self.n_embd // self.n_head


@dataclass(slots=True)
class Model:
    """A model being put together: metadata (without the "{arch}." prefix) and tensors in file order."""

    arch: str
    shape: Shape
    types: Sequence[ExpertTypes]
    rng: np.random.Generator
    metadata: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, tuple[np.ndarray, Type]] = field(default_factory=dict)  # name: (data, type)

    def add(
        self, name: str, shape: tuple[int, ...], std: float, qtype: Type = Type.F32, mean: float = 0.0
    ) -> None:
        """Random tensor; `shape` has the slowest dimension first, as in numpy."""
        data = random_blocks(self.rng, qtype, shape, std)
        if mean:
            data += np.float32(mean)
        self.tensors[name] = (data, qtype)

    def norm(self, name: str, n: int | None = None) -> None:
        self.add(f"{name}.weight", (n or self.shape.n_embd,), 0.1, mean=1.0)

    def bias(self, name: str, *shape: int, std: float = 0.1) -> None:
        self.add(f"{name}.bias", shape, std)

    def matrix(self, name: str, n_in: int, n_out: int, qtype: Type = Type.Q8_0) -> None:
        self.add(f"{name}.weight", (n_out, n_in), n_in**-0.5, qtype)

    def experts(self, name: str, n_in: int, n_out: int, qtype: Type, n_expert: int | None = None) -> None:
        self.add(f"{name}.weight", (n_expert or self.shape.n_expert, n_out, n_in), 1.5 * n_in**-0.5, qtype)

    def layer_types(self, il: int) -> tuple[Type, Type, Type]:
        """Types of layer `il`'s (gate, up, down) experts; `types` is repeated over the layers."""
        types = self.types[il % len(self.types)]
        return types if isinstance(types, tuple) else (types, types, types)


# ---- parts that several architectures share ------------------------------------------------------


def _embeddings(m: Model, output: bool = True) -> None:
    """In float32: a quantised output matrix would hide differences in the last bits of the hidden state."""
    m.add("token_embd.weight", (N_VOCAB, m.shape.n_embd), 1.0)
    m.norm("output_norm")
    if output:
        m.matrix("output", m.shape.n_embd, N_VOCAB, Type.F32)


def _attention(
    m: Model, il: int, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: int = 0
) -> None:
    """Norm, q, k, v and output projection; `qk_norm` is the length of the q and k norms, 0 for none."""
    s, n_kv = m.shape, m.shape.n_head_kv * m.shape.n_head_dim
    m.norm(f"blk.{il}.attn_norm")
    for name, n_out in (("attn_q", s.n_embd), ("attn_k", n_kv), ("attn_v", n_kv)):
        m.matrix(f"blk.{il}.{name}", s.n_embd, n_out)
        if qkv_bias:
            m.bias(f"blk.{il}.{name}", n_out)
    m.matrix(f"blk.{il}.attn_output", s.n_embd, s.n_embd)
    if out_bias:
        m.bias(f"blk.{il}.attn_output", s.n_embd)
    if qk_norm:
        m.norm(f"blk.{il}.attn_q_norm", qk_norm)
        m.norm(f"blk.{il}.attn_k_norm", qk_norm)


def _router(m: Model, il: int) -> None:
    m.add(f"blk.{il}.ffn_gate_inp.weight", (m.shape.n_expert, m.shape.n_embd), 2 * m.shape.n_embd**-0.5)


def _moe(
    m: Model, il: int, *, gated: bool = True, fused: bool = False, biases: bool = False, scales: bool = False
) -> None:
    """Router and experts; `fused` writes gate and up as one tensor, `scales` one factor per expert."""
    s = m.shape
    gate, up, down = m.layer_types(il)
    _router(m, il)
    if fused:
        m.experts(f"blk.{il}.ffn_gate_up_exps", s.n_embd, 2 * s.n_ff_exp, up)
    else:
        m.experts(f"blk.{il}.ffn_up_exps", s.n_embd, s.n_ff_exp, up)
        if gated:
            m.experts(f"blk.{il}.ffn_gate_exps", s.n_embd, s.n_ff_exp, gate)
    m.experts(f"blk.{il}.ffn_down_exps", s.n_ff_exp, s.n_embd, down)
    for name, n_out in (("gate", s.n_ff_exp), ("up", s.n_ff_exp), ("down", s.n_embd)):
        if biases:
            m.bias(f"blk.{il}.ffn_{name}_exps", s.n_expert, n_out)
        if scales:
            m.add(f"blk.{il}.ffn_{name}_exps.scale", (s.n_expert,), 0.2, mean=1.0)


def _dense(m: Model, il: int, n_ff: int, suffix: str = "", gated: bool = True) -> None:
    """Feed-forward part of a dense layer, or (suffix "_shexp") of the shared experts."""
    n_embd = m.shape.n_embd
    if gated:
        m.matrix(f"blk.{il}.ffn_gate{suffix}", n_embd, n_ff)
    m.matrix(f"blk.{il}.ffn_up{suffix}", n_embd, n_ff)
    m.matrix(f"blk.{il}.ffn_down{suffix}", n_ff, n_embd)


def _layers(m: Model) -> range:
    return range(m.shape.n_layer)


# ---- architectures -------------------------------------------------------------------------------


def _qwen3moe(m: Model) -> None:
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il, qk_norm=m.shape.n_head_dim)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)


def _qwen3moe_scaled(m: Model) -> None:
    """One factor per expert and projection, as NVFP4 conversions have."""
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il, qk_norm=m.shape.n_head_dim)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il, scales=True)


def _qwen2moe(m: Model) -> None:
    """Shared expert with its own gate; router weights are not normalised."""
    m.metadata["expert_shared_feed_forward_length"] = m.shape.n_ff
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il, qkv_bias=True)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)
        m.add(f"blk.{il}.ffn_gate_inp_shexp.weight", (m.shape.n_embd,), m.shape.n_embd**-0.5)
        _dense(m, il, m.shape.n_ff, "_shexp")


def _olmoe(m: Model) -> None:
    m.metadata["attention.head_count_kv"] = m.shape.n_head
    _embeddings(m)
    for il in _layers(m):
        n_embd = m.shape.n_embd
        m.norm(f"blk.{il}.attn_norm")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            m.matrix(f"blk.{il}.{name}", n_embd, n_embd)
        m.norm(f"blk.{il}.attn_q_norm", n_embd)
        m.norm(f"blk.{il}.attn_k_norm", n_embd)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)


def _mixtral(m: Model) -> None:
    _embeddings(m, output=False)
    for il in _layers(m):
        _attention(m, il)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)


def _llama_ungated(m: Model) -> None:
    """Experts without a gate projection (llama.cpp's loader of "llama" lets it be absent)."""
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il, gated=False)


def _phimoe(m: Model) -> None:
    _embeddings(m)
    m.bias("output_norm", m.shape.n_embd)
    m.bias("output", N_VOCAB)
    for il in _layers(m):
        _attention(m, il, qkv_bias=True, out_bias=True)
        m.bias(f"blk.{il}.attn_norm", m.shape.n_embd)
        m.norm(f"blk.{il}.ffn_norm")
        m.bias(f"blk.{il}.ffn_norm", m.shape.n_embd)
        _moe(m, il)


def _deepseek(m: Model) -> None:
    """DeepSeek V1: leading dense layer, two shared experts, scaled router weights."""
    m.metadata |= {"leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.5}
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il)
        m.norm(f"blk.{il}.ffn_norm")
        if il == 0:
            _dense(m, il, m.shape.n_ff)
        else:
            _moe(m, il)
            _dense(m, il, 2 * m.shape.n_ff_exp, "_shexp")


_MLA = {"q_rank": 128, "kv_rank": 64, "rope": 32, "nope": 32, "value": 64}


def _mla_attention(m: Model, il: int, absorbed: bool) -> None:
    """Multi-head latent attention; `absorbed` has k_b and v_b split, which decodes as one KV head."""
    s, n = m.shape, _MLA
    m.norm(f"blk.{il}.attn_norm")
    m.norm(f"blk.{il}.attn_q_a_norm", n["q_rank"])
    m.norm(f"blk.{il}.attn_kv_a_norm", n["kv_rank"])
    m.matrix(f"blk.{il}.attn_q_a", s.n_embd, n["q_rank"])
    m.matrix(f"blk.{il}.attn_q_b", n["q_rank"], s.n_head * (n["nope"] + n["rope"]))
    m.matrix(f"blk.{il}.attn_kv_a_mqa", s.n_embd, n["kv_rank"] + n["rope"])
    if absorbed:
        m.add(f"blk.{il}.attn_k_b.weight", (s.n_head, n["kv_rank"], n["nope"]), n["nope"] ** -0.5, Type.Q8_0)
        m.add(
            f"blk.{il}.attn_v_b.weight", (s.n_head, n["value"], n["kv_rank"]), n["kv_rank"] ** -0.5, Type.Q8_0
        )
    else:
        m.matrix(f"blk.{il}.attn_kv_b", n["kv_rank"], s.n_head * (n["nope"] + n["value"]))
    m.matrix(f"blk.{il}.attn_output", s.n_head * n["value"], s.n_embd)


def _mla_metadata(m: Model, absorbed: bool) -> None:
    n = _MLA
    key, value = n["nope"] + n["rope"], n["value"]
    m.metadata |= {
        "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 1.5,
        "rope.dimension_count": n["rope"],
        "attention.q_lora_rank": n["q_rank"], "attention.kv_lora_rank": n["kv_rank"],
        "attention.head_count_kv": 1 if absorbed else m.shape.n_head,
        "attention.key_length": n["kv_rank"] + n["rope"] if absorbed else key,
        "attention.value_length": n["kv_rank"] if absorbed else value,
    }  # fmt: skip
    if absorbed:
        m.metadata |= {"attention.key_length_mla": key, "attention.value_length_mla": value}


def _deepseek2(
    m: Model, *, absorbed: bool = False, selection_bias: bool = False, fused: bool = False
) -> None:
    _mla_metadata(m, absorbed)
    _embeddings(m)
    for il in _layers(m):
        _mla_attention(m, il, absorbed)
        m.norm(f"blk.{il}.ffn_norm")
        if il == 0:
            _dense(m, il, m.shape.n_ff)
            continue
        _moe(m, il, fused=fused)
        if selection_bias:
            m.bias(f"blk.{il}.exp_probs_b", m.shape.n_expert, std=0.05)
        _dense(m, il, m.shape.n_ff_exp, "_shexp")


def _deepseek3(m: Model) -> None:
    """DeepSeek V3 and R1: sigmoid router, selection bias, 2 of 4 expert groups, normalised weights."""
    m.metadata |= {"expert_gating_func": _SIGMOID, "expert_weights_norm": True}
    m.metadata |= {"expert_group_count": 4, "expert_group_used_count": 2}
    _deepseek2(m, absorbed=True, selection_bias=True)


def _deepseek2_fused(m: Model) -> None:
    """Gate and up experts in one tensor."""
    _deepseek2(m, absorbed=True, fused=True)


def _gpt_oss(m: Model) -> None:
    """Biases on router and experts, softmax over the chosen experts' logits, clamped activation, sinks."""
    s = m.shape
    m.metadata |= {"attention.key_length": s.n_head_dim, "attention.value_length": s.n_head_dim}
    m.metadata["attention.sliding_window"] = 16
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il, qkv_bias=True, out_bias=True)
        m.norm(f"blk.{il}.post_attention_norm")
        m.add(f"blk.{il}.attn_sinks.weight", (s.n_head,), 1.0)
        _moe(m, il, biases=True)
        m.bias(f"blk.{il}.ffn_gate_inp", s.n_expert)


def _glm4moe(m: Model) -> None:
    m.metadata |= {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_weights_scale": 1.5}
    m.metadata["expert_weights_norm"] = True
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il, qkv_bias=True, qk_norm=m.shape.n_head_dim)
        m.norm(f"blk.{il}.post_attention_norm")
        if il == 0:
            _dense(m, il, m.shape.n_ff)
        else:
            _moe(m, il)
            m.bias(f"blk.{il}.exp_probs_b", m.shape.n_expert, std=0.05)
            _dense(m, il, m.shape.n_ff_exp, "_shexp")


def _llama4(m: Model) -> None:
    """Weights applied before the experts; every second layer is dense."""
    m.metadata["interleave_moe_layer_step"] = 2
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il)
        m.norm(f"blk.{il}.ffn_norm")
        if il % 2 == 0:
            _dense(m, il, m.shape.n_ff)
        else:
            _moe(m, il)
            _dense(m, il, m.shape.n_ff_exp, "_shexp")


def _granitemoe(m: Model) -> None:
    m.metadata |= {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 2.0, "attention.scale": 0.1}
    m.metadata["expert_shared_feed_forward_length"] = m.shape.n_ff
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)
        _dense(m, il, m.shape.n_ff, "_shexp")


def _dbrx(m: Model) -> None:
    s = m.shape
    m.metadata |= {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 8.0}
    _embeddings(m)
    for il in _layers(m):
        m.norm(f"blk.{il}.attn_norm")
        m.matrix(f"blk.{il}.attn_qkv", s.n_embd, s.n_embd + 2 * s.n_head_kv * s.n_head_dim)
        m.matrix(f"blk.{il}.attn_output", s.n_embd, s.n_embd)
        m.norm(f"blk.{il}.attn_output_norm")
        _moe(m, il)


def _grok(m: Model) -> None:
    """GELU experts, and norms after attention and experts."""
    m.metadata |= {"embedding_scale": 1.0, "logit_scale": 1.0}
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il)
        m.norm(f"blk.{il}.attn_output_norm")
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)
        m.norm(f"blk.{il}.layer_output_norm")


def _smallthinker(m: Model) -> None:
    """ReLU experts; the router reads the layer's input, before attention."""
    m.metadata["expert_gating_func"] = _SIGMOID
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)


def _step35(m: Model) -> None:
    """SwiGLU clamped to a limit per layer."""
    s = m.shape
    m.metadata |= {
        "expert_shared_feed_forward_length": s.n_ff, "expert_weights_norm": True,
        "expert_weights_scale": 1.5, "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [il % 2 == 0 for il in _layers(m)],
        "rope.freq_base_swa": 10000.0, "swiglu_clamp_exp": [0.5, 0.0, 0.25][: s.n_layer],
    }  # fmt: skip
    _embeddings(m)
    for il in _layers(m):
        _attention(m, il, qk_norm=s.n_head_dim)
        m.norm(f"blk.{il}.ffn_norm")
        _moe(m, il)
        _dense(m, il, s.n_ff, "_shexp")


def _maple(m: Model) -> None:
    """The other form of clamped SwiGLU: one operation clamps gate and up."""
    m.metadata |= {"attention.sliding_window": 16, "swiglu_clamp_exp": [0.5, 1.0, 0.25]}
    m.metadata["attention.sliding_window_pattern"] = [il % 2 == 0 for il in _layers(m)]
    _qwen3moe(m)


def _grovemoe(m: Model) -> None:
    """Two sets of experts in each layer: the second has one expert for each two of the first."""
    s, n_ff = m.shape, 256
    m.metadata |= {
        "expert_chunk_feed_forward_length": n_ff,
        "expert_group_scale": 0.1,
        "experts_per_group": 2,
    }
    _qwen3moe(m)
    for il in _layers(m):
        gate, up, down = m.layer_types(il)
        m.experts(f"blk.{il}.ffn_gate_chexps", s.n_embd, n_ff, gate, s.n_expert // 2)
        m.experts(f"blk.{il}.ffn_up_chexps", s.n_embd, n_ff, up, s.n_expert // 2)
        m.experts(f"blk.{il}.ffn_down_chexps", n_ff, s.n_embd, down, s.n_expert // 2)


def _qwen3next(m: Model) -> None:
    """Recurrent layers (gated delta net) and one with attention; shared expert; fused gate and up experts."""
    s, d_state, n_group, n_rank = m.shape, 32, 2, 4
    key, value = d_state * n_group, d_state * n_rank
    m.metadata |= {
        "expert_shared_feed_forward_length": s.n_ff, "ssm.conv_kernel": 4, "ssm.inner_size": value,
        "ssm.state_size": d_state, "ssm.time_step_rank": n_rank,
        "ssm.group_count": n_group, "full_attention_interval": 2,
        "attention.key_length": s.n_head_dim, "attention.value_length": s.n_head_dim,
    }  # fmt: skip
    _embeddings(m)
    for il in _layers(m):
        m.norm(f"blk.{il}.attn_norm")
        m.norm(f"blk.{il}.post_attention_norm")
        if (il + 1) % 2:
            m.matrix(f"blk.{il}.attn_qkv", s.n_embd, 2 * key + value)
            m.matrix(f"blk.{il}.attn_gate", s.n_embd, value)
            m.add(f"blk.{il}.ssm_conv1d.weight", (2 * key + value, 4), 0.5)
            m.bias(f"blk.{il}.ssm_dt", n_rank)
            m.add(f"blk.{il}.ssm_a", (n_rank,), 0.1, mean=-1.0)
            m.matrix(f"blk.{il}.ssm_ba", s.n_embd, 2 * n_rank)
            m.norm(f"blk.{il}.ssm_norm", d_state)
            m.matrix(f"blk.{il}.ssm_out", value, s.n_embd)
        else:
            n_kv = s.n_head_kv * s.n_head_dim
            for name, n_out in (("attn_q", 2 * s.n_embd), ("attn_k", n_kv), ("attn_v", n_kv)):
                m.matrix(f"blk.{il}.{name}", s.n_embd, n_out)
            m.matrix(f"blk.{il}.attn_output", s.n_embd, s.n_embd)
            m.norm(f"blk.{il}.attn_q_norm", s.n_head_dim)
            m.norm(f"blk.{il}.attn_k_norm", s.n_head_dim)
        _moe(m, il, fused=True)
        m.add(f"blk.{il}.ffn_gate_inp_shexp.weight", (s.n_embd,), s.n_embd**-0.5)
        _dense(m, il, s.n_ff, "_shexp")


_MAMBA2 = {"conv": 4, "inner": 128, "state": 16, "rank": 2}


def _mamba2(m: Model, il: int) -> None:
    s, n = m.shape, _MAMBA2
    n_conv = n["inner"] + 2 * n["state"]
    m.norm(f"blk.{il}.attn_norm")
    m.matrix(f"blk.{il}.ssm_in", s.n_embd, n["inner"] + n_conv + n["rank"])
    m.add(f"blk.{il}.ssm_conv1d.weight", (n_conv, n["conv"]), 0.5)
    m.bias(f"blk.{il}.ssm_conv1d", n_conv)
    m.bias(f"blk.{il}.ssm_dt", n["rank"])
    m.add(f"blk.{il}.ssm_a", (n["rank"], 1), 0.1, mean=-1.0)
    m.add(f"blk.{il}.ssm_d", (n["rank"], 1), 0.1, mean=1.0)
    m.add(f"blk.{il}.ssm_norm.weight", (1, n["inner"]), 0.1, mean=1.0)
    m.matrix(f"blk.{il}.ssm_out", n["inner"], s.n_embd)


def _nemotron_h_moe(m: Model) -> None:
    """Squared-ReLU experts without a gate; Mamba, attention and experts are separate layers."""
    s, n = m.shape, _MAMBA2
    kinds = ["mamba", "moe", "attention", "moe"]
    m.metadata |= {
        "attention.layer_norm_epsilon": 1e-5, "expert_shared_feed_forward_length": s.n_ff,
        "expert_shared_count": 1, "expert_weights_norm": True, "expert_weights_scale": 1.5,
        "attention.key_length": s.n_head_dim, "attention.value_length": s.n_head_dim,
        "attention.head_count_kv": [s.n_head_kv if kind == "attention" else 0 for kind in kinds],
        "feed_forward_length": [s.n_ff_exp if kind == "moe" else 0 for kind in kinds],
        "ssm.conv_kernel": n["conv"], "ssm.inner_size": n["inner"], "ssm.state_size": n["state"],
        "ssm.time_step_rank": n["rank"], "ssm.group_count": 1,
    }  # fmt: skip
    _embeddings(m)
    for il, kind in enumerate(kinds):
        if kind == "mamba":
            _mamba2(m, il)
        elif kind == "attention":
            _attention(m, il)
        else:
            m.norm(f"blk.{il}.attn_norm")
            _moe(m, il, gated=False)
            m.bias(f"blk.{il}.exp_probs_b", s.n_expert, std=0.05)
            _dense(m, il, s.n_ff, "_shexp", gated=False)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to build one model: llama.cpp's name of the architecture, its tensors, its sizes."""

    arch: str
    build: Callable[[Model], None]
    shape: Shape = Shape()
    first_moe_layer: int = 0
    moe_layer_step: int = 1

    def moe_layers(self) -> list[int]:
        return list(range(self.first_moe_layer, self.shape.n_layer, self.moe_layer_step))


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture("qwen3moe", _qwen3moe, Shape(n_expert=16, n_expert_used=4)),
    "qwen3moe-scaled": Architecture("qwen3moe", _qwen3moe_scaled),
    "qwen2moe": Architecture("qwen2moe", _qwen2moe),
    "olmoe": Architecture("olmoe", _olmoe),
    "mixtral": Architecture("llama", _mixtral),
    "llama-ungated": Architecture("llama", _llama_ungated),
    "phimoe": Architecture("phimoe", _phimoe),
    "deepseek": Architecture("deepseek", _deepseek, first_moe_layer=1),
    "deepseek2": Architecture("deepseek2", _deepseek2, first_moe_layer=1),
    "deepseek2-fused": Architecture("deepseek2", _deepseek2_fused, first_moe_layer=1),
    "deepseek3": Architecture(
        "deepseek2", _deepseek3, Shape(n_expert=16, n_expert_used=4), first_moe_layer=1
    ),
    "gpt-oss": Architecture("gpt-oss", _gpt_oss),
    "glm4moe": Architecture("glm4moe", _glm4moe, first_moe_layer=1),
    "llama4": Architecture("llama4", _llama4, Shape(n_layer=4, n_expert_used=1), 1, 2),
    "granitemoe": Architecture("granitemoe", _granitemoe),
    "dbrx": Architecture("dbrx", _dbrx),
    "grok": Architecture("grok", _grok),
    "smallthinker": Architecture("smallthinker", _smallthinker),
    "step35": Architecture("step35", _step35),
    "maple": Architecture("maple", _maple),
    "grovemoe": Architecture("grovemoe", _grovemoe),
    "qwen3next": Architecture("qwen3next", _qwen3next),
    "nemotron-h-moe": Architecture("nemotron_h_moe", _nemotron_h_moe, Shape(n_layer=4), 1, 2),
}


NOT_SPLIT = "grovemoe"  # the engine leaves it to stock: two sets of experts per layer


def write_model(
    path: Path,
    name: str,
    types: Sequence[ExpertTypes] = MIXED_TYPES,
    seed: int = 0,
    n_layer: int | None = None,
) -> Path:
    """Write the model `name` of ARCHITECTURES; `types` gives the experts' types layer by layer, repeated.

    `n_layer`: None: as many as of its shape.
    """
    architecture = ARCHITECTURES[name]
    shape = replace(architecture.shape, n_layer=n_layer or architecture.shape.n_layer)
    model = Model(architecture.arch, shape, types, np.random.default_rng(seed))
    model.metadata |= _common_metadata(shape)
    architecture.build(model)
    _write(path, model)
    return path


def write_copy(path: Path, model: Path, *types: Type) -> Path:
    """Write the experts of `model` once more, and nothing else, in these types by turns; (): in the same."""
    writer = GGUFWriter(path, "copy")
    experts = [tensor for tensor in GGUFReader(model).tensors if tensor.name.endswith("_exps.weight")]
    for i, tensor in enumerate(experts):
        of = types[i % len(types)] if types else tensor.tensor_type
        data = quantize(dequantize(tensor.data, tensor.tensor_type), of) if types else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_expert_lora(path: Path, name: str, il: int = 0, rank: int = 4) -> Path:
    """Write a LoRA adapter of the model `name` that touches layer `il`'s up experts."""
    architecture, rng = ARCHITECTURES[name], np.random.default_rng(1)
    s = architecture.shape
    writer = GGUFWriter(path, architecture.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for suffix, shape in (("a", (s.n_expert, rank, s.n_embd)), ("b", (s.n_expert, s.n_ff_exp, rank))):
        data = random_blocks(rng, Type.F32, shape, 0.1)
        writer.add_tensor(f"blk.{il}.ffn_up_exps.weight.lora_{suffix}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _common_metadata(s: Shape) -> dict[str, object]:
    return {
        "context_length": 512, "embedding_length": s.n_embd, "block_count": s.n_layer,
        "feed_forward_length": s.n_ff, "expert_feed_forward_length": s.n_ff_exp,
        "attention.head_count": s.n_head, "attention.head_count_kv": s.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0, "vocab_size": N_VOCAB,
        "expert_count": s.n_expert, "expert_used_count": s.n_expert_used,
    }  # fmt: skip


def _write(path: Path, model: Model) -> None:
    writer = GGUFWriter(path, model.arch)
    for key, value in model.metadata.items():
        _write_value(writer, f"{model.arch}.{key}", value)
    _write_vocabulary(writer)
    for name, (data, qtype) in model.tensors.items():
        writer.add_tensor(name, data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_value(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    writer.add_key_value(key, value, kinds[type(value)])


def _write_vocabulary(writer: GGUFWriter) -> None:
    """SentencePiece-type vocabulary of bytes: token 3 + b is byte b."""
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
