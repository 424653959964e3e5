"""The adapter: low-rank changes of the attention's projections, and an embedding per mask, only at masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyspac.errors import UsageError
from tools.train_mtp.base import Base
from tools.train_mtp.layout import Layout

# only of the attention: an adapter of the experts or of their router would keep them from being split
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


class GatedLora(nn.Module):
    """y = x W + gate * (x A) B in every projection, gate 1 at masks and 0 elsewhere.

    `embedding` [n_masks, n_embd] float32 is added to the base's embeddings of `mask_ids`. A projection of
    name N has `a[N]` [rank, n_in] and `b[N]` [n_out, rank] float32 (dots in N are written as slashes).
    """

    def __init__(self, base: Base, mask_ids: list[int], rank: int) -> None:
        super().__init__()
        self.mask_ids = mask_ids
        table = base.embeddings.weight.detach().float()
        noise = torch.randn(len(mask_ids), table.shape[1], device=table.device) * table.std() * 0.1
        self.embedding = nn.Parameter(table.mean(0) + noise - table[mask_ids])
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for name, linear in projections(base.model):
            n_out, n_in = linear.weight.shape
            key = name.replace(".", "/")
            self.a[key] = nn.Parameter(torch.randn(rank, n_in) * n_in**-0.5)
            self.b[key] = nn.Parameter(torch.zeros(n_out, rank))
        self._mask: Tensor | None = None  # of the layout that is being computed
        self._hooks = [base.embeddings.register_forward_hook(self._embed)]
        self._attach(base)
        self.to(base.device)

    def _attach(self, base: Base) -> None:
        for name, linear in projections(base.model):
            key = name.replace(".", "/")

            def change(_: Any, inputs: tuple[Tensor], out: Tensor, key: str = key) -> Tensor:
                return self._project(key, inputs[0], out)

            self._hooks.append(linear.register_forward_hook(change))

    def detach(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def at(self, mask: Tensor) -> Iterator[None]:
        """Within, the model's tokens are those of a `Layout.mask`; outside, the adapter does nothing."""
        self._mask = mask
        try:
            yield
        finally:
            self._mask = None

    def _embed(self, _: Any, __: Any, out: Tensor) -> Tensor:
        if self._mask is None:
            return out
        none = torch.zeros_like(self.embedding[:1])
        return out + F.embedding(self._mask, torch.cat((none, self.embedding))).to(out.dtype)

    def _project(self, key: str, x: Tensor, out: Tensor) -> Tensor:
        if self._mask is None:
            return out
        change = F.linear(F.linear(x, self.a[key].to(x.dtype)), self.b[key].to(x.dtype))
        return out + change * (self._mask > 0).to(x.dtype).unsqueeze(-1)


def projections(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The attention's projections by their names. Raises UsageError where none has these names."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in PROJECTIONS and isinstance(module, nn.Linear)
    ]
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no attention projections named {', '.join(PROJECTIONS)}; "
            "an adapter can be trained for models that have them"
        )
    return found


def choose_mask_ids(base: Base, n_masks: int) -> list[int]:
    """The last ids of the vocabulary that neither begin nor end a text: ordinary text seldom has them."""
    config = base.model.config
    taken: set[int] = set()
    for special in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        taken |= set(special) if isinstance(special, list) else {special}
    free = [i for i in range(base.n_vocab - n_masks - len(taken), base.n_vocab) if i not in taken]
    return free[-n_masks:]


def forward(base: Base, adapter: GatedLora, layout: Layout) -> Tensor:
    """Logits of all tokens of the rows: [n_text, n_row, n_vocab], in the model's type."""
    dtype = base.embeddings.weight.dtype
    bias = torch.zeros(layout.attention.shape, dtype=dtype, device=layout.attention.device)
    bias.masked_fill_(~layout.attention, torch.finfo(dtype).min)
    with adapter.at(layout.mask):
        out = base.model(layout.ids, attention_mask=bias, position_ids=layout.positions, use_cache=False)
    logits: Tensor = out.logits
    return logits
