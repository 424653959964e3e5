"""A model that generates in, a routing trace out.

`TracedContext` is a context that carries a probe and knows which tokens were taken back. The graph is
stock's, evaluated piece by piece: results are the same, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from pyspac.errors import UsageError
from pyspac.generate.decode import Generation, Interrupt
from pyspac.generate.llama import Context, ContextParams, Model
from pyspac.generate.session import Session
from pyspac.lab.probe import Array, RoutedLayer, RoutingProbe
from pyspac.lab.trace import Trace
from pyspac.lab.trace_builder import Pass, build_trace, trace_geometry
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import read_header

_N_KEPT: Final = 64  # tokens of the widest piece whose router inputs are kept: drafts, and no prompts


class ProbedContext(Context):
    """A context whose routers a probe reads."""

    def __init__(self, model: Model, params: ContextParams, probe: RoutingProbe) -> None:
        """As Context; the probe must outlive it."""
        self.probe = probe
        super().__init__(model, params)

    def _c_params(self) -> Any:
        c_params = super()._c_params()
        c_params.cb_eval = self.probe.callback
        return c_params


class DraftContext(ProbedContext):
    """A draft model's context that keeps what its routers were given for the tokens that it drafted from."""

    def __init__(self, model: Model, params: ContextParams, probe: RoutingProbe) -> None:
        """As ProbedContext; nothing is kept yet."""
        self.kept: dict[int, tuple[int, dict[int, Array]]] = {}  # position: token, [n_embd] by layer
        super().__init__(model, params, probe)

    def _decode_piece(self, tokens: Sequence[int], n_outputs: int) -> None:
        first = self.n_past
        super()._decode_piece(tokens, n_outputs)
        inputs = dict(self.probe.inputs)
        self.probe.take()
        if len(tokens) > _N_KEPT:
            return
        for i, token in enumerate(tokens):
            # a layer that ran for the last tokens only has fewer rows
            rows = {il: rows[i - len(tokens)] for il, rows in inputs.items() if len(rows) >= len(tokens) - i}
            self.kept[first + i] = (token, rows)

    def take(self, position: int, tokens: Sequence[int]) -> list[dict[int, Array]]:
        """Return each token's router inputs [n_embd] by layer, and forget these and those before.

        A token that was not computed has none.
        """
        found = [self.kept.get(position + i, (token, {})) for i, token in enumerate(tokens)]
        end = position + len(tokens)
        self.kept = {at: entry for at, entry in self.kept.items() if at >= end}
        return [rows if was == token else {} for (was, rows), token in zip(found, tokens, strict=True)]


class TracedContext(ProbedContext):
    """A context whose forward passes are recorded in `passes`."""

    def __init__(
        self, model: Model, params: ContextParams, probe: RoutingProbe, draft: DraftContext | None = None
    ) -> None:
        """As ProbedContext; `draft`: its router inputs go through the routers of this model, too."""
        self.passes: list[Pass] = []
        self.draft = draft
        super().__init__(model, params, probe)

    def compute(self, batch: Any, n_new: int) -> None:
        """As Context; mask tokens, which follow the sequence's, are left out."""
        position, tokens = self.n_past, batch.token[:n_new]
        super().compute(batch, n_new)
        layers = self.probe.take()
        if batch.n_tokens > n_new:
            layers = {il: layer.first(n_new) for il, layer in layers.items()}
        if self.draft is not None:
            self._gate(self.draft, layers, position, tokens)
        self.passes.append(Pass(layers, position, len(tokens), len(tokens), tuple(tokens)))

    def _gate(
        self, draft: DraftContext, layers: dict[int, RoutedLayer], position: int, tokens: Sequence[int]
    ) -> None:
        """Ask each layer's router with the input that the draft model's had for the same token."""
        inputs = draft.take(position, tokens)
        for il, layer in layers.items():
            router, bias, n = self.probe.routers[il], self.probe.biases.get(il, 0.0), len(layer.experts)
            layer.draft = np.full((n, len(router)), np.nan, np.float32)
            for row, of_token in zip(layer.draft, inputs[-n:], strict=True):
                if il in of_token:
                    row[:] = router @ of_token[il] + bias

    def rollback(self, n_past: int) -> None:
        """Take tokens back, and note which: rejected drafts."""
        if n_past < self.n_past:
            last = self.passes[-1]
            last.n_kept = min(last.n_kept, n_past - last.position)
        super().rollback(n_past)


class TraceSession(Session):
    """A stock session whose target context is traced."""

    def __init__(self, probe: RoutingProbe, draft_probe: RoutingProbe | None, *args: Any) -> None:
        """As Session, with probes that outlive it; draft_probe: of the draft model, for the draft gate."""
        self.probe, self.draft_probe = probe, draft_probe  # the contexts are opened with them
        self.draft_context: DraftContext | None = None
        self.n_prompt = 0
        super().__init__(*args)

    def _open_context(self, model: Model, n_draft_max: int) -> Context:
        context = super()._open_context(model, n_draft_max)
        params = context.params
        if model is self.model:
            context.close()
            return TracedContext(model, params, self.probe, self.draft_context)
        if self.draft_probe is None:
            return context
        context.close()
        self.draft_context = DraftContext(model, params, self.draft_probe)
        return self.draft_context

    def generate(
        self,
        prompt: list[int],
        on_token: Callable[[int], None] = lambda token: None,
        interrupt: Interrupt | None = None,
    ) -> Generation:
        """As Session; remembers where the prompt ends."""
        self.n_prompt = len(prompt)
        return super().generate(prompt, on_token, interrupt)

    def trace(self) -> Trace:
        """Return what was recorded."""
        assert isinstance(self.context, TracedContext)
        return build_trace(trace_geometry(self.options.model), self.context.passes, self.n_prompt)


def check_draft_gate(model: Path, draft: Path | None) -> None:
    """Raise UsageError unless the draft model's router inputs fit the routers of the target."""
    if draft is None:
        raise UsageError("--draft-gate records what a draft model's routers see: name one with -md")
    target, drafter = (read_geometry(read_header(path)) for path in (model, draft))
    if not drafter.is_moe:
        raise UsageError(
            f"--draft-gate needs a draft model with experts, and {draft} is dense: its layers have no router "
            "whose input could be taken; give one such as the target itself in fewer bits"
        )
    if drafter.n_embd != target.n_embd:
        raise UsageError(
            f"--draft-gate needs a draft model as wide as the target: {draft} has a width of "
            f"{drafter.n_embd}, {model} of {target.n_embd}; give one such as the target itself in fewer bits"
        )
