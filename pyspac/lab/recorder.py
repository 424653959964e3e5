"""A raw trace in, a routing trace out.

All arithmetic is here: routers that are asked early, or with the draft model's inputs. What was taken back is
known by what came next: a rejected draft's position is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from pyspac.lab.raw_trace import Array, RawPass
from pyspac.lab.trace import EARLY_MAX, TraceError
from pyspac.lab.trace_builder import Pass, RoutedLayer

TARGET: Final = 0  # the context that a program makes first
_N_KEPT: Final = 64  # tokens of the widest pass whose router inputs are kept: drafts, and no prompts


@dataclass(slots=True)
class DraftInputs:
    """What the draft model's routers, or dense FFNs, were given for the tokens in its context."""

    kept: dict[int, tuple[int, dict[int, Array]]] = field(default_factory=dict)  # position: token, by layer

    def add(self, one: RawPass) -> None:
        """A pass of the draft model; it replaces what was there from its first position on."""
        n = len(one.tokens)
        first = int(one.positions[0]) if n else 0
        self.kept = {at: entry for at, entry in self.kept.items() if at < first}
        if n > _N_KEPT:
            return
        for i, (token, at) in enumerate(zip(one.tokens, one.positions, strict=True)):
            # a layer that ran for the last tokens only has fewer rows
            rows = {il: r[i - n] for il, r in one.nodes.get("input", {}).items() if len(r) >= n - i}
            self.kept[int(at)] = (int(token), rows)

    def of(self, one: RawPass) -> list[dict[int, Array]]:
        """Each token's inputs [n_embd] by layer; a token that was not computed has none."""
        pairs = zip(one.positions.tolist(), one.tokens.tolist(), strict=True)
        found = [(*self.kept.get(at, (token, {})), token) for at, token in pairs]
        return [rows if was == token else {} for was, rows, token in found]


def read_target(
    passes: Iterable[RawPass],
    *,
    wants_logits: bool = False,
    wants_early: bool = False,
    gates: Sequence[int] | None = None,
) -> list[Pass]:
    """The target's passes; how many tokens were kept is known of all but the last, which keeps all.

    `gates`: the draft model's layer that tells of each of the target's; None: none is recorded.
    """
    draft, found = DraftInputs(), list[Pass]()
    for one in passes:
        if one.context != TARGET:
            draft.add(one)
            continue
        if not len(one.tokens):
            continue
        layers = _layers(one, wants_logits=wants_logits, wants_early=wants_early)
        if gates is not None:
            _gate(one, layers, draft.of(one), gates)
        position, n = int(one.positions[0]), len(one.tokens)
        if found:
            last = found[-1]
            last.n_kept = min(last.n_kept, max(1, position - last.position))
        found.append(Pass(layers, position, n, n, tuple(one.tokens.tolist())))
    return found


def ends_with(passes: list[Pass], n_prompt: int, text: Sequence[int]) -> bool:
    """Note what was kept in the last pass, by the tokens that were generated; whether all of them are there.

    The last one was sampled, and is no part of a pass.
    """
    decoded = [one for one in passes if one.position >= n_prompt]
    if decoded:
        last = decoded[-1]
        rest = text[last.position - n_prompt :]
        same = [a == b for a, b in zip(last.tokens, rest, strict=False)]
        last.n_kept = max(1, same.index(False) if False in same else len(same))
    n_read = sum(one.n_token for one in passes if one.position < n_prompt)
    return n_read >= n_prompt and sum(one.n_kept for one in decoded) >= len(text) - 1


def without_undecided(passes: list[Pass], n_prompt: int) -> list[Pass]:
    """Without a last pass with drafts, whose fate is unknown."""
    is_open = bool(passes) and passes[-1].position >= n_prompt and passes[-1].n_token > 1
    return passes[:-1] if is_open else passes


def _layers(one: RawPass, *, wants_logits: bool, wants_early: bool) -> dict[int, RoutedLayer]:
    nodes, routers = one.nodes, one.constants.get("router", {})
    layers: dict[int, RoutedLayer] = {}
    for il, experts in nodes.get("topk", {}).items():
        layer = layers[il] = RoutedLayer(experts)
        if il in nodes.get("weights", {}):
            layer.weights = nodes["weights"][il].reshape(experts.shape)
        if wants_logits:
            layer.logits = nodes.get("logits", {}).get(il)
        if wants_early:
            layer.early = _early_logits(one, il, _router(routers, il), len(experts))
    return layers


def _router(routers: dict[int, Array], il: int) -> Array:
    if il not in routers:
        raise TraceError(f"--early and --draft-gate know no router in layer {il}: it is no plain matrix")
    return routers[il].astype(np.float32)


def _bias(one: RawPass, il: int) -> Any:
    """Experts are selected by what a bias makes of the logits."""
    return one.constants.get("bias", {}).get(il, np.float32(0))


def _early_logits(one: RawPass, il: int, router: Array, n: int) -> Array:
    """[EARLY_MAX, n, n_expert] a layer's router on the inputs of the routers before it."""
    early = np.full((EARLY_MAX, n, len(router)), np.nan, np.float32)
    before = [rows for layer, rows in one.nodes.get("input", {}).items() if layer < il]
    for at, rows in zip(early, before[::-1], strict=False):
        at[:] = rows[len(rows) - n :] @ router.T + _bias(one, il)
    return early


def _gate(
    one: RawPass, layers: dict[int, RoutedLayer], inputs: list[dict[int, Array]], gates: Sequence[int]
) -> None:
    """Ask each layer's router with what the draft model's router or FFN got for the same token."""
    for il, layer in layers.items():
        router, n = _router(one.constants.get("router", {}), il), len(layer.experts)
        layer.draft = np.full((n, len(router)), np.nan, np.float32)
        for row, of_token in zip(layer.draft, inputs[len(inputs) - n :], strict=True):
            if gates[il] in of_token:
                row[:] = router @ of_token[gates[il]] + np.ravel(_bias(one, il))
