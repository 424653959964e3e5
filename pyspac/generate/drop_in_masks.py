"""Mask tokens in a `llama_cpp.Llama`: its context and model as `masks.py` and its drafter want them.

In: the object's own context, in which it computes as well. Out: logits of the tokens that it asked for; the
masks of the same pass are the drafter's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pyspac.errors import UsageError
from pyspac.generate.libllama import lib
from pyspac.generate.llama import ALL_SEQUENCES, Context, ContextParams, Logits, Model
from pyspac.generate.lora_drafter import LoraDrafter, open_lora_drafter
from pyspac.generate.vocab import Vocab
from pyspac.speculation.cost_table import masked_width

if TYPE_CHECKING:
    from pathlib import Path

    from pyspac.generate.loading import Loading
    from pyspac.generate.split import Split


class BorrowedModel(Model):
    """Somebody else's, who closes it."""

    def __init__(self, path: Path, ptr: int) -> None:
        self.path, self.ptr, self.vocab = path, ptr, Vocab(ptr)

    def close(self) -> None:
        """Not ours."""


class BorrowedContext(Context):
    """Somebody else's, who computes in it as well: `n_past` is told before each pass."""

    def __init__(self, model: Model, params: ContextParams, ptr: int) -> None:
        self.model, self.params, self.ptr = model, params, ptr
        self.n_ctx, self.why_failed = params.n_ctx, str
        self.memory = lib.llama_get_memory(ptr)
        self.go_to(0)

    def go_to(self, n_past: int) -> None:
        """So many tokens are in it, as its owner says."""
        self.n_past = self._n_held = n_past

    def close(self) -> None:
        """Not ours."""


class MaskedEvals:
    """The passes with masks of one `Llama`."""

    def __init__(
        self,
        loading: Loading,
        pointers: tuple[int, int],
        n_ctx: int,
        stack: ExitStack,
        split: Split | None,
    ) -> None:
        """`pointers`: the model's and the context's; `stack` closes it, before these.

        Raises ModelError if llama.cpp refuses the adapter.
        """
        model_ptr, ctx_ptr = pointers
        options, adapter = loading.options, loading.preflight.adapter
        assert options.mtp is not None
        assert adapter is not None
        params = ContextParams(n_ctx=n_ctx, n_groups=1 + options.effective_draft_max)
        self._context = BorrowedContext(BorrowedModel(options.model, model_ptr), params, ctx_ptr)
        self.drafter: LoraDrafter = open_lora_drafter(options.mtp, adapter, self._context, stack)
        if split is not None:
            self.drafter.decoder.count_first = split.engine.count_first
        self.first: int | None = None  # position of the last pass's first token, if it had masks

    def before_eval(self, n_past: int) -> None:
        """The owner has so many tokens left, and computes more; of the groups it takes back none."""
        lib.llama_memory_seq_rm(self._context.memory, ALL_SEQUENCES, n_past, -1)
        self.drafter.decoder.truncate(n_past)
        self.first = None

    def forget(self) -> None:
        """What the context holds is another text: which group has which of its tokens is not known."""
        self.drafter.keep(0)
        self.first = None

    def decode(self, tokens: Sequence[int], n_past: int) -> Logits:
        """Compute the last token and the drafts, and what is drafted next: [n_tokens, n_vocab]."""
        self._context.go_to(n_past)
        logits = self.drafter.verify(self._context, tokens)
        self.first = n_past
        return logits


def n_draft_that_fits(n_draft_max: int, n_batch: int) -> int:
    """The longest draft of which a pass, with as many masks behind each token, is one batch."""
    return max((n for n in range(n_draft_max + 1) if masked_width(n, n) <= n_batch), default=0)


def check_alone(*, has_lora: bool, embeds: bool, has_draft: bool) -> None:
    """Raise UsageError for what cannot be beside an adapter with mask tokens."""
    others = ((has_lora, "lora_path"), (embeds, "embedding=True"), (has_draft, "draft_model"))
    for given, name in others:
        if given:
            raise UsageError(f"{name} and mtp cannot be given together: leave one of them out")
