"""The model itself drafts: a LoRA adapter makes mask tokens predict what comes (masks.py).

In: the logits of the masks behind the last token that held. Out: drafts for the next step. There is no
distribution, so sampled verification treats the drafts as certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from pyspac.errors import ModelError
from pyspac.generate.drafting import Drafter, DraftResult
from pyspac.generate.llama import Context, Logits
from pyspac.generate.masks import MaskedDecoder
from pyspac.model.mtp import MtpAdapter, MtpSampler


class LoraDrafter(Drafter):
    """Each step that may draft has masks; the first of them verifies nothing, as there are no drafts yet."""

    def __init__(self, decoder: MaskedDecoder, sampler: MtpSampler | None = None) -> None:
        """`sampler`: chooses each draft with a look at the one before it; None: the likeliest tokens."""
        self.decoder = decoder
        self.sampler = sampler
        self._n_masks = 0  # behind each token of the next pass
        self._n_known = 0  # tokens of the sequence that `_rows` follow
        self._rows: Logits | None = None  # of the masks: [n_tokens, n_masks, n_vocab]; accepted: [1, ...]

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        drafted = self._read(tokens, n_max)
        self._n_known = len(tokens)
        self._rows = None
        self._n_masks = self._choose_n_masks(len(drafted), n_max)
        return DraftResult(drafted, n_masks=(1 + len(drafted)) * self._n_masks)

    def _choose_n_masks(self, n_draft: int, n_max: int) -> int:
        """As many as may be drafted next; fewer at the context's end, where the masks need cells, too."""
        room = self.decoder.context.n_ctx - (self._n_known - 1)
        return max(0, min(n_max, len(self.decoder.mask_ids), room // (1 + n_draft) - 1))

    def _read(self, tokens: Sequence[int], n_max: int) -> list[int]:
        """The drafts that the masks of the last pass make."""
        drafted: list[int] = []
        if self._rows is None or len(tokens) != self._n_known:
            return drafted
        token = tokens[-1]
        for logits in self._rows[0, :n_max]:
            token = self.sampler.rerank(logits, token) if self.sampler else int(np.argmax(logits))
            drafted.append(token)
            if self.decoder.context.model.vocab.is_eog(token):
                break  # nothing follows the end
        return drafted

    def verify(self, context: Context, tokens: Sequence[int]) -> Logits:
        """See Drafter: the masks are in the same pass."""
        if self._n_masks == 0:
            return super().verify(context, tokens)
        logits, self._rows = self.decoder.decode(tokens, self._n_masks)
        return logits

    def accept(self, n: int) -> None:
        self._n_known += n + 1
        if self._rows is not None:
            self._rows = self._rows[n : n + 1]

    def keep(self, n: int) -> int:
        """See Drafter."""
        self._rows = None
        self.decoder.truncate(n)
        return n


def open_lora_drafter(path: Path, adapter: MtpAdapter, target: Context, stack: ExitStack) -> LoraDrafter:
    """The drafter of the adapter in `path`; `stack` closes it. Raises ModelError."""
    if target.model.is_recurrent:
        raise ModelError(
            f"{target.model.path}: the recurrent layers of this model cannot keep mask tokens apart, which "
            "draft-lora needs; use another drafter, or --spec-type none"
        )
    n_draft_max = target.params.n_groups - 1
    decoder = MaskedDecoder(target, path, adapter.mask_ids[:n_draft_max])
    return LoraDrafter(stack.enter_context(decoder), adapter.sampler)
