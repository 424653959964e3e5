"""The shape of a Mixture-of-Experts model, read from its GGUF header.

In: a `GgufHeader`. Out: a `MoeGeometry`: how many layers and experts, how many bytes one expert takes in each
layer, which quantisation, and so how many experts fit into a given amount of device memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pyspac.model.gguf_header import GgufHeader, TensorInfo

_EXPERT_TENSOR: Final = re.compile(r"blk\.(\d{1,3})\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)")
_SHARED_TENSOR: Final = re.compile(r"blk\.(\d{1,3})\.ffn_(gate|up|down)_shexp\.weight")
_PROJECTIONS: Final = ("gate", "up", "gate_up", "down")
N_MATRICES: Final = 3  # of an expert: gate, up and down; each read by itself where it stays on disk
# Of the disk (SPAC_DISK_ALIGNMENT). The engine asks the kernel, by a call that Python has not; where blocks
# are larger, and memory is too little for them, it says so itself.
DISK_BLOCK: Final = 4096


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One transformer layer. A dense layer has `n_expert` 0."""

    il: int
    n_expert: int
    expert_bytes: int  # one expert: gate, up and down together, biases included
    quantisation: tuple[tuple[str, str], ...]  # (projection, type), for example ("down", "Q6_K")
    shared_bytes: int  # the shared expert, computed for every token; 0: none
    matrices: tuple[int, ...] = ()  # bytes of each matrix of one expert

    @property
    def is_moe(self) -> bool:
        return self.n_expert > 0

    @property
    def slot_bytes(self) -> int:
        """What one expert takes of memory where experts stay on disk: each matrix in whole blocks."""
        return sum((n + 2 * DISK_BLOCK - 2) // DISK_BLOCK * DISK_BLOCK for n in self.matrices)

    @property
    def layout(self) -> str:
        """The types in one word, for example "gate,up=Q4_K down=Q6_K"; layers of equal layout share slots."""
        by_type: dict[str, list[str]] = {}
        for projection, type_name in self.quantisation:
            by_type.setdefault(type_name, []).append(projection)
        return " ".join(f"{','.join(names)}={type_name}" for type_name, names in by_type.items())


@dataclass(frozen=True, slots=True)
class MoeGeometry:
    """A model's layers and experts; `layers` holds dense layers too."""

    architecture: str
    name: str
    n_layer: int
    n_expert: int  # largest of any layer; 0: a dense model
    n_expert_used: int  # top-k of the router
    n_expert_shared: int
    n_leading_dense: int
    n_embd: int
    n_ctx_train: int
    model_bytes: int
    layers: tuple[LayerGeometry, ...]

    @property
    def is_moe(self) -> bool:
        return self.n_moe_layer > 0

    @property
    def moe_layers(self) -> tuple[LayerGeometry, ...]:
        return tuple(layer for layer in self.layers if layer.is_moe)

    @property
    def n_moe_layer(self) -> int:
        return len(self.moe_layers)

    @property
    def n_experts_total(self) -> int:
        """(layer, expert) pairs."""
        return sum(layer.n_expert for layer in self.layers)

    @property
    def experts_bytes(self) -> int:
        """All routed experts of all layers."""
        return sum(layer.n_expert * layer.expert_bytes for layer in self.layers)

    @property
    def largest_expert_bytes(self) -> int:
        """Of any layer; 0: a dense model."""
        return max((layer.expert_bytes for layer in self.layers), default=0)

    @property
    def matrix_bytes(self) -> int:
        """A matrix of the largest expert, on average: as much as one read of experts on disk."""
        return self.largest_expert_bytes // N_MATRICES

    @property
    def slot_bytes(self) -> int:
        """Of any expert on disk, in memory: all slots are as large as the largest needs; 0: a dense model."""
        return max((layer.slot_bytes for layer in self.layers), default=0)

    def n_experts_in(self, n_bytes: float) -> int:
        """How many (layer, expert) pairs of average size fit into `n_bytes`."""
        if not self.experts_bytes:
            return 0
        return min(self.n_experts_total, int(n_bytes * self.n_experts_total / self.experts_bytes))

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: the fields above, the layers as a list of objects."""
        fields = (
            "architecture",
            "name",
            "n_layer",
            "n_moe_layer",
            "n_expert",
            "n_expert_used",
            "n_expert_shared",
            "n_leading_dense",
            "n_embd",
            "n_ctx_train",
            "model_bytes",
            "n_experts_total",
            "experts_bytes",
        )
        result: dict[str, Any] = {field: getattr(self, field) for field in fields}
        result["layers"] = [_layer_dict(layer) for layer in self.layers]
        return result


def _layer_dict(layer: LayerGeometry) -> dict[str, Any]:
    return {
        "il": layer.il,
        "n_expert": layer.n_expert,
        "expert_bytes": layer.expert_bytes,
        "quantisation": dict(layer.quantisation),
        "shared_bytes": layer.shared_bytes,
    }


def read_geometry(header: GgufHeader) -> MoeGeometry:
    """The geometry of the model in `header`; a dense model gives `is_moe` False."""
    n_layer = int(_largest(header.get("block_count", 0)))
    layers = tuple(_read_layers(header.tensors, n_layer))
    n_leading = next((layer.il for layer in layers if layer.is_moe), 0)
    return MoeGeometry(
        architecture=header.architecture,
        name=str(header.metadata.get("general.name", header.path.stem)),
        n_layer=n_layer,
        n_expert=max((layer.n_expert for layer in layers), default=0),
        n_expert_used=int(_largest(header.get("expert_used_count", 0))),
        n_expert_shared=int(_largest(header.get("expert_shared_count", 0)))
        or int(any(x.shared_bytes for x in layers)),
        n_leading_dense=n_leading,
        n_embd=int(_largest(header.get("embedding_length", 0))),
        n_ctx_train=int(_largest(header.get("context_length", 0))),
        model_bytes=sum(tensor.n_bytes for tensor in header.tensors),
        layers=layers,
    )


def _largest(value: Any) -> float:
    """Some architectures give one value per layer."""
    return max(value, default=0) if isinstance(value, list) else value


def _read_layers(tensors: Iterable[TensorInfo], n_layer: int) -> Iterable[LayerGeometry]:
    experts: dict[int, list[tuple[str, str, TensorInfo]]] = {}
    shared: Counter[int] = Counter()
    for tensor in tensors:
        if match := _EXPERT_TENSOR.fullmatch(tensor.name):
            experts.setdefault(int(match[1]), []).append((match[2], match[3], tensor))
        elif match := _SHARED_TENSOR.fullmatch(tensor.name):
            shared[int(match[1])] += tensor.n_bytes
    for il in range(max([n_layer, *(il + 1 for il in experts)])):
        yield _read_layer(il, experts.get(il, []), shared[il])


def _read_layer(il: int, experts: list[tuple[str, str, TensorInfo]], shared_bytes: int) -> LayerGeometry:
    weights = {projection: tensor for projection, kind, tensor in experts if kind == "weight"}
    # weights are [n_in, n_out, n_expert]
    n_expert = max((tensor.shape[-1] for tensor in weights.values() if len(tensor.shape) == 3), default=0)
    n_bytes = sum(tensor.n_bytes for _, _, tensor in experts)
    return LayerGeometry(
        il=il,
        n_expert=n_expert,
        expert_bytes=n_bytes // n_expert if n_expert else 0,
        quantisation=tuple((p, weights[p].type_name) for p in _PROJECTIONS if p in weights),
        shared_bytes=shared_bytes,
        matrices=tuple(weights[p].n_bytes // n_expert for p in _PROJECTIONS if p in weights and n_expert),
    )
