"""The model writes texts, and what a head reads of it while drafting is kept: hidden states, predictions.

A head guesses what its model will say, not what other people wrote, so it learns from the model's own texts.
The GGUF itself computes them, several at a time, with experts wherever a run would have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pyspac.errors import UsageError
from pyspac.forward.hidden_states import HiddenStates, States
from pyspac.forward.runner import Runner
from pyspac.forward.sequences import Sequences
from pyspac.train.captured import Captured, Rows
from pyspac.train.corpus import Module

SEED: Final = 1
N_TEXTS: Final = 16  # that are written at a time: as many as a batch that is split may have
_F16_MAX: Final = float(np.finfo(np.float16).max)

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


def cut_prompts(runner: Runner, modules: Sequence[Module], n_text: int, n_prompt: int, seed: int) -> Ids:
    """Pieces of the modules, one behind another, in an order that the seed decides: [n_text, n_prompt].

    Those of a longer run begin with those of a shorter one. Raises UsageError for too little text.
    """
    vocab = runner.model.vocab
    ids = [i for m in modules for i in vocab.tokenize(m.text, add_special=False, parse_special=False)]
    if len(ids) <= n_prompt:
        raise UsageError(f"the texts have {len(ids)} tokens to begin with; give longer ones: -f")
    starts = np.random.default_rng(seed).integers(len(ids) - n_prompt, size=n_text)
    return np.array([ids[a : a + n_prompt] for a in starts])


def write(
    runner: Runner,
    captured: Captured,
    prompts: Ids,
    *,
    greedy: bool,
    on_texts: Callable[[int], None] = lambda n: None,
) -> None:
    """A text behind each of the prompts [n, n_prompt] that `captured` has none for yet.

    `greedy`: all of them, else every second one; the others are sampled at temperature 1. `runner`: of
    `N_TEXTS` sequences. `on_texts` gets how many there are.
    """
    n_done = min(len(captured), len(prompts))
    if not np.array_equal(captured.prompts()[:n_done], prompts[:n_done]):
        raise UsageError(
            f"{captured.folder} has texts behind other prompts; give another --work-dir or delete it"
        )
    about = captured.about
    runner.context.clear()
    with (
        HiddenStates(runner.context, about.layers, about.n_embd) as states,
        Sequences(runner.context) as sequences,
    ):
        writer = Writer(runner, sequences, states, captured)
        for first in range(n_done, len(prompts), N_TEXTS):
            chosen = range(first, min(first + N_TEXTS, len(prompts)))
            sampled = [None if greedy or i % 2 == 0 else np.random.default_rng((SEED, i)) for i in chosen]
            captured.append(writer.write(prompts[first : chosen.stop], sampled))
            on_texts(len(captured))


class Writer:
    """Some texts at a time, all of one length."""

    def __init__(
        self, runner: Runner, sequences: Sequences, states: HiddenStates, captured: Captured
    ) -> None:
        self._runner, self._sequences, self._states = runner, sequences, states
        self._about = captured.about
        vocab = runner.model.vocab
        self._ends = np.array([i for i in range(vocab.n_tokens) if vocab.is_eog(i)], np.int64)

    def write(self, prompts: Ids, sampled: Sequence[np.random.Generator | None]) -> Rows:
        """Texts behind prompts [n, n_prompt]; each greedy, or drawn by a generator of its own."""
        ids = prompts.astype(np.int32)
        self._sequences.rollback(0)
        states = self._read(ids[:, :-1])
        tops = []
        for _ in range(self._about.n_new):
            states.append(self._decode(ids[:, -1:], has_logits=True))
            logits = np.array(self._runner.context.logits(len(prompts)))
            tops.append(likeliest(logits, self._about.n_top))
            logits[:, self._ends] = -np.inf  # a text goes on
            new = [choose(row, rng) for row, rng in zip(logits, sampled, strict=True)]
            ids = np.concatenate((ids, np.array(new, np.int32)[:, None]), 1)
        top_ids, top_logs = (np.stack(part, 1) for part in zip(*tops, strict=True))
        kept = np.concatenate(states, 1).clip(-_F16_MAX, _F16_MAX).astype(np.float16)
        return Rows(ids, kept, top_ids, top_logs)

    def _read(self, ids: npt.NDArray[np.int32]) -> list[States]:
        """Prompts, in as few batches as there may be."""
        n_piece = self._runner.context.params.n_ubatch // len(ids)
        pieces = range(0, ids.shape[1], n_piece)
        states = [self._decode(ids[:, first : first + n_piece], has_logits=False) for first in pieces]
        self._runner.after_prompt()
        return states

    def _decode(self, ids: npt.NDArray[np.int32], *, has_logits: bool) -> States:
        """Hidden states of [n_text, n] tokens: [n_text, n, n_layers, n_embd]."""
        self._sequences.decode(ids.tolist(), has_logits=has_logits)
        if has_logits:
            self._runner.after_step(1, len(ids))
        return self._states.read(ids.size).reshape(*ids.shape, len(self._about.layers), self._about.n_embd)


def likeliest(logits: Logits, n_top: int) -> tuple[npt.NDArray[np.int32], Logits]:
    """Of rows [n, n_vocab]: the ids of the likeliest tokens, best first, and logarithms of their chances."""
    n_top = min(n_top, logits.shape[1])
    best = logits.max(1, keepdims=True)
    total = best + np.log(np.exp(logits - best).sum(1, keepdims=True))
    ids = np.argpartition(-logits, n_top - 1, axis=1)[:, :n_top]
    ids = np.take_along_axis(ids, np.argsort(-np.take_along_axis(logits, ids, 1), axis=1), 1)
    return ids.astype(np.int32), np.take_along_axis(logits, ids, 1) - total


def choose(logits: Logits, rng: np.random.Generator | None) -> int:
    """The likeliest token of [n_vocab], or one drawn at temperature 1."""
    if rng is None:
        return int(logits.argmax())
    return int((logits + rng.gumbel(size=logits.shape)).argmax())
