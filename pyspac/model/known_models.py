"""Models that people run, by their published sizes: a name and a quantisation in, bytes of each type out.

`known_models.json` has the sizes with their sources; `scripts/make_synthetic_gguf.py --like` writes models of
the same geometries. A quantisation is a recipe, as of llama.cpp's llama-quantize: published files differ by a
few per cent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pyspac.model.device_needs import has_tail, kv_bytes, query_width
from pyspac.model.geometry import MoeGeometry
from pyspac.model.gguf_header import GgufHeader

FILE: Final = Path(__file__).with_suffix(".json")
_KV_BYTES: Final = 2  # F16
_SUPER_BLOCK: Final = 256
_WHERE_ROWS_DO_NOT_FIT: Final = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # whole blocks of 256; as llama-quantize

Bytes = Counter[str]  # by type, "Q4_K"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Types by what a matrix is for; of two types half of the layers have each."""

    experts: str
    experts_down: tuple[str, ...]
    others: str
    embeddings: str
    output: str


RECIPES: Final = {
    "Q4_K_M": Recipe(
        experts="Q4_K", experts_down=("Q4_K", "Q6_K"), others="Q4_K", embeddings="Q4_K", output="Q6_K"
    ),
    "Q8_0": Recipe(experts="Q8_0", experts_down=("Q8_0",), others="Q8_0", embeddings="Q8_0", output="Q8_0"),
    "MXFP4": Recipe(
        experts="MXFP4", experts_down=("MXFP4",), others="Q8_0", embeddings="Q8_0", output="Q8_0"
    ),
    "Q4_K": Recipe(  # of synthetic models
        experts="Q4_K", experts_down=("Q4_K",), others="Q8_0", embeddings="Q8_0", output="Q8_0"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """Published sizes of one model; numbers of weights unless they say bytes."""

    name: str
    source: str
    arch: str
    total_b: float  # 1e9 weights in all, as published; 0: made up
    active_b: float
    n_layer: int
    n_layer_dense: int  # the first ones
    n_embd: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    n_ff_exp: int
    n_ff_shared: int
    n_ff_dense: int
    has_tied_output: bool
    quantisations: list[str]
    heads: dict[str, int] = field(default_factory=dict)  # n, n_kv, dim: of ordinary attention in every layer
    attention: list[dict[str, int]] = field(default_factory=list)  # else per kind of layer
    has_tail: bool = False  # as of Weights

    @property
    def n_layer_moe(self) -> int:
        return self.n_layer - self.n_layer_dense

    @property
    def n_attention(self) -> int:
        """Of all layers."""
        return sum(kind["n_layer"] * kind["n_weights"] for kind in self._kinds())

    def kv_bytes(self, n_ctx: int) -> int:
        """Keys and values of so many tokens; a window holds no more than its own."""
        return sum(
            kind["n_layer"] * kind["kv_per_token"] * min(n_ctx, kind.get("window", n_ctx)) * _KV_BYTES
            for kind in self._kinds()
        )

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries, summed over layers."""
        return sum(kind["n_layer"] * kind["query_width"] for kind in self._kinds())

    def _kinds(self) -> list[dict[str, int]]:
        if self.attention:
            return self.attention
        n, n_kv, dim = self.heads["n"], self.heads["n_kv"], self.heads["dim"]
        n_weights = 2 * self.n_embd * dim * (n + n_kv)
        return [
            {
                "n_layer": self.n_layer, "n_weights": n_weights, "kv_per_token": 2 * n_kv * dim,
                "query_width": n * dim,
            }
        ]  # fmt: skip


@cache
def known_models() -> Mapping[str, KnownModel]:
    """By the name that --like takes."""
    entries: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: KnownModel(**entry) for name, entry in entries.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a token reads, in bytes by type: of a known model, or of a file."""

    name: str
    quantisation: str
    n_layer: int
    n_layer_moe: int
    n_expert: int
    n_expert_used: int
    dense: Bytes  # read for every token, but
    output: Bytes  # of which prompts read what their last token needs
    expert: Bytes  # one expert, on average over the layers
    table_bytes: int  # embeddings, of which a token reads a row
    kv: Mapping[int, int]  # context -> bytes
    query_width: int  # of attention, all layers
    kv_row_bytes: int  # keys and values of one token, all layers
    has_tail: bool = False  # windows or recurrent layers: a prompt's last tokens come on their own

    @property
    def types(self) -> set[str]:
        return {*self.dense, *self.output, *self.expert}

    @property
    def expert_bytes(self) -> int:
        return self.expert.total()

    @property
    def experts_bytes(self) -> int:
        return self.n_layer_moe * self.n_expert * self.expert_bytes

    @property
    def others_bytes(self) -> int:
        return self.dense.total() + self.output.total() + self.table_bytes

    @property
    def model_bytes(self) -> int:
        return self.experts_bytes + self.others_bytes

    @classmethod
    def of_known(cls, model: KnownModel, quantisation: str, n_ctx: int) -> Self:
        recipe = RECIPES[quantisation]
        table = _bytes(recipe.embeddings, model.n_vocab * model.n_embd)
        dense = Counter({recipe.others: _bytes(recipe.others, _n_dense(model))})
        output = Counter({recipe.output: _bytes(recipe.output, model.n_vocab * model.n_embd)})
        dense["F32"] += 4 * model.n_layer_moe * model.n_embd * model.n_expert  # routers
        return cls(
            name=model.name, quantisation=quantisation, n_layer=model.n_layer,
            n_layer_moe=model.n_layer_moe, n_expert=model.n_expert, n_expert_used=model.n_expert_used,
            dense=dense, output=Counter({recipe.embeddings: table}) if model.has_tied_output else output,
            expert=_expert(model, recipe), table_bytes=0 if model.has_tied_output else table,
            kv={n_ctx: model.kv_bytes(n_ctx)}, query_width=model.query_width,
            kv_row_bytes=model.kv_bytes(1), has_tail=model.has_tail,
        )  # fmt: skip

    @classmethod
    def of_file(cls, header: GgufHeader, geometry: MoeGeometry, kv: Mapping[int, int]) -> Self:
        """What is in the file."""
        dense: Bytes = Counter()
        output: Bytes = Counter()
        experts: Bytes = Counter()
        has_output = any(tensor.name == "output.weight" for tensor in header.tensors)
        table = 0
        for tensor in header.tensors:
            if "_exps." in tensor.name:
                experts[tensor.type_name] += tensor.n_bytes
            elif tensor.name == "token_embd.weight" and has_output:
                table = tensor.n_bytes
            elif tensor.name in ("output.weight", "token_embd.weight"):  # the second serves as both
                output[tensor.type_name] += tensor.n_bytes
            else:
                dense[tensor.type_name] += tensor.n_bytes
        n = max(1, geometry.n_experts_total)
        return cls(
            name=geometry.name, quantisation=max(experts, key=experts.__getitem__, default="-"),
            n_layer=geometry.n_layer,
            n_layer_moe=geometry.n_moe_layer, n_expert=geometry.n_expert,
            n_expert_used=geometry.n_expert_used, dense=dense, output=output,
            expert=Counter({name: size // n for name, size in experts.items()}), table_bytes=table, kv=kv,
            query_width=query_width(header), kv_row_bytes=kv_bytes(header, 1), has_tail=has_tail(header),
        )  # fmt: skip


def all_weights(n_ctx: int) -> Iterator[Weights]:
    """Of each known model each usual quantisation."""
    for model in known_models().values():
        if model.total_b:
            yield from (Weights.of_known(model, name, n_ctx) for name in model.quantisations)


def _n_dense(model: KnownModel) -> int:
    shared = model.n_layer_moe * 3 * model.n_embd * model.n_ff_shared
    return model.n_attention + shared + model.n_layer_dense * 3 * model.n_embd * model.n_ff_dense


def _expert(model: KnownModel, recipe: Recipe) -> Bytes:
    n = model.n_embd * model.n_ff_exp
    found: Bytes = Counter({recipe.experts: _bytes(recipe.experts, 2 * n)})
    for name in recipe.experts_down:
        fitting = _WHERE_ROWS_DO_NOT_FIT.get(name, name) if model.n_ff_exp % _SUPER_BLOCK else name
        found[fitting] += _bytes(fitting, n) // len(recipe.experts_down)
    return found


def _bytes(type_name: str, n_weights: int) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return int(n_weights * size // block)
