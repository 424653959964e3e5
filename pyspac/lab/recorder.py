"""A model that generates in, a routing trace out.

`TracedContext` is a context that carries a probe and knows which tokens were taken back. The graph is
stock's, evaluated piece by piece: results are the same, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyspac.generate.decode import Generation, Interrupt
from pyspac.generate.llama import Context, ContextParams, Model
from pyspac.generate.session import Session
from pyspac.lab.probe import RoutingProbe
from pyspac.lab.trace import Trace
from pyspac.lab.trace_builder import Pass, build_trace, trace_geometry


class TracedContext(Context):
    """A context whose forward passes are recorded in `passes`."""

    def __init__(self, model: Model, params: ContextParams, probe: RoutingProbe) -> None:
        """As Context; the probe must outlive it."""
        self.probe = probe
        self.passes: list[Pass] = []
        super().__init__(model, params)

    def _c_params(self) -> Any:
        c_params = super()._c_params()
        c_params.cb_eval = self.probe.callback
        return c_params

    def _decode_piece(self, tokens: Sequence[int], n_outputs: int) -> None:
        position = self.n_past
        super()._decode_piece(tokens, n_outputs)
        self.passes.append(Pass(self.probe.take(), position, len(tokens), len(tokens)))

    def rollback(self, n_past: int) -> None:
        """Take tokens back, and note which: rejected drafts."""
        last = self.passes[-1]
        last.n_kept = min(last.n_kept, n_past - last.position)
        super().rollback(n_past)


class TraceSession(Session):
    """A stock session whose target context is traced."""

    def __init__(self, probe: RoutingProbe, *args: Any) -> None:
        """As Session, with a probe that outlives it."""
        self.probe = probe  # the context is opened with it
        self.n_prompt = 0
        super().__init__(*args)

    def _open_context(self, model: Model, n_draft_max: int) -> Context:
        context = super()._open_context(model, n_draft_max)
        if model is not self.model:
            return context
        params = context.params
        context.close()
        return TracedContext(model, params, self.probe)

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
