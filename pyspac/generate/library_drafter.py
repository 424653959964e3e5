"""llama.cpp's own drafters (common/speculative), through libspac: `spac_drafter_*` in spac.h.

Their drafts are the likeliest tokens, without a distribution, so sampled verification treats them as
certain (`Sampler.verify` with no `probs`), which keeps the target's distribution. `TextDrafter` is for those
that look at the text alone, `LibraryDrafter` for all that have a model: a draft model, a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from pyspac._native import check, ffi, lib
from pyspac.errors import PyspacError
from pyspac.generate.drafting import Drafter, DraftResult, FreeDrafter
from pyspac.model import spec_types

if TYPE_CHECKING:
    from contextlib import ExitStack

    from pyspac.generate.llama import Context, Model
    from pyspac.generate.options import RunOptions

N_DRAFT_MAX: Final[int] = lib.SPAC_DRAFT_MAX


class Handle:
    """One `spac_drafter`. Used by one thread at a time; close it before the contexts."""

    def __init__(
        self,
        types: str,
        n_draft_max: int,
        *,
        target: Context | None = None,
        draft: Context | None = None,
        p_min: float = 0.0,
    ) -> None:
        """`types`: llama.cpp's names, comma-separated. Raises EngineError if llama.cpp refuses it."""
        self._contexts = [context for context in (target, draft) if context is not None]
        self._ptr: Any = None
        self._check_contexts()
        params = ffi.new("spac_drafter_params *", lib.spac_drafter_default_params())
        name = ffi.new("char[]", types.encode())  # alive until the call is over
        params.types, params.n_max, params.p_min = name, n_draft_max, p_min
        params.target, params.draft = _pointer(target), _pointer(draft)
        out = ffi.new("spac_drafter **")
        check(lib.spac_drafter_open(params, out))
        self._ptr = out[0]
        self._drafted = ffi.new("int32_t[]", N_DRAFT_MAX)
        self._n = ffi.new("int32_t *")
        self._token = ffi.new("int32_t *")

    def begin(self, n_keep: int) -> int:
        """A new sequence, the same as the last one for `n_keep` tokens; how many of these it has."""
        self._n[0] = n_keep
        check(lib.spac_drafter_begin(self._live(), self._n))
        return int(self._n[0])

    def process(self, tokens: Sequence[int], pos: int) -> None:
        """The target has computed `tokens`, of which the first stands at `pos`, in its last batch."""
        check(lib.spac_drafter_process(self._live(), ffi.new("int32_t[]", tokens), len(tokens), pos))

    def defer(self, token: int, pos: int) -> None:
        """The same of one token, in every plain step: it is looked at when the next draft is made."""
        self._token[0] = token
        if status := lib.spac_drafter_defer(self._live(), self._token, 1, pos):
            check(status)

    def draft(self, token: int, pos: int, n_max: int) -> list[int]:
        """What follows `token`, which stands at `pos` and is not processed yet."""
        check(lib.spac_drafter_draft(self._live(), token, pos, n_max, self._drafted, self._n))
        return list(self._drafted[0 : self._n[0]])

    def accept(self, n: int) -> None:
        """The first `n` tokens of the last draft hold."""
        check(lib.spac_drafter_accept(self._live(), n))

    def _live(self) -> Any:
        if self._ptr is None:
            raise PyspacError("the drafter is closed: open another one")
        self._check_contexts()
        return self._ptr

    def _check_contexts(self) -> None:
        for context in self._contexts:  # in every step: no generator
            if context.ptr is None:
                raise PyspacError("a context of the drafter is closed: close the drafter first")

    def close(self) -> None:
        """Also after its contexts: closing touches none of them."""
        if self._ptr is not None:
            lib.spac_drafter_close(self._ptr)
            self._ptr = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class TextDrafter(FreeDrafter):
    """One or more of llama.cpp's n-gram drafters. It is told the text when it drafts, not before."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._n_known = 0  # tokens of the sequence that it has

    def draft_at(self, tokens: Sequence[int], end: int, n_max: int) -> list[int]:
        """See FreeDrafter."""
        if n_max <= 0:
            return []
        self._n_known = min(self._n_known, end - 1)
        self.handle.process(tokens[self._n_known : end - 1], self._n_known)
        self._n_known = end - 1
        return self.handle.draft(tokens[end - 1], end - 1, n_max)

    def keep(self, n: int) -> int:
        """See Drafter."""
        self._n_known = self.handle.begin(n)
        return n

    def accept(self, n: int) -> None:
        self.handle.accept(n)


class LibraryDrafter(Drafter):
    """llama.cpp's drafters with a model, alone or after n-grams.

    They see every batch of the target, as heads read its hidden states. While nothing is drafted they look at
    none: states are kept, and the next draft begins with all that was missed, in one batch.
    """

    def __init__(self, handle: Handle, context: Context) -> None:
        """`context`: the draft's."""
        self.handle = handle
        self.context = context
        self._batch: list[int] = []  # that the target computes next, or has just computed
        self._pos = 0

    def read(self, tokens: Sequence[int], n_past: int) -> None:
        self.handle.process(tokens, n_past)

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        self._pos = len(tokens) - 1
        drafted = self.handle.draft(tokens[-1], self._pos, n_max) if n_max > 0 else []
        self._batch = [tokens[-1], *drafted]
        return DraftResult(drafted)

    def accept(self, n: int) -> None:
        if len(self._batch) == 1:
            return self.handle.defer(self._batch[0], self._pos)
        self.handle.process(self._batch, self._pos)
        return self.handle.accept(n)

    def keep(self, n: int) -> int:
        """See Drafter."""
        return self.handle.begin(n)


def open_library_drafter(
    options: RunOptions, target: Context, draft: Model | None, stack: ExitStack
) -> TextDrafter | LibraryDrafter:
    """The drafter of `options`; `stack` closes it. `draft`: its model; None: the target's head, or none."""
    types, n_max = options.effective_spec_type, options.effective_draft_max
    if spec_types.is_free(types):
        return TextDrafter(stack.enter_context(Handle(types, n_max)))
    context = stack.enter_context(_open_context(types, target, draft or target.model))
    handle = Handle(types, n_max, target=target, draft=context, p_min=options.draft_p_min)
    return LibraryDrafter(stack.enter_context(handle), context)


def _open_context(types: str, target: Context, model: Model) -> Context:
    """As large as the target's: both hold the same tokens."""
    from pyspac.generate.llama import Context

    is_head = spec_types.DRAFT_MTP in spec_types.names_of(types)
    params = replace(target.params, n_outputs_max=1, n_rollback_max=0, target=target, is_head=is_head)
    return Context(model, params)


def _pointer(context: Context | None) -> Any:
    return ffi.NULL if context is None else ffi.cast("struct llama_context *", context.ptr)
