"""llama.cpp's drafters look at nothing while nothing is drafted: what they then draft is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import eagle_models
import gguf_models
import head_models
import input_models
import pytest
from near_ties import NEAR_TIE, margins

from pyspac.errors import EngineError
from pyspac.generate.drafting import DraftResult
from pyspac.generate.libllama import lib
from pyspac.generate.library_drafter import LibraryDrafter
from pyspac.generate.options import RunOptions
from pyspac.generate.session import Session

PROMPT = "hello world, hello world, hello"
N_PAUSE = 24  # tokens


def simple(folder: Path) -> RunOptions:
    target, draft = input_models.write_target(folder / "t.gguf"), input_models.write_draft(folder / "d.gguf")
    return RunOptions(model=target, draft=draft, spec_type="draft-simple", stock=True)


def eagle(folder: Path) -> RunOptions:
    target = gguf_models.write_model(folder / "t.gguf", "qwen3moe")
    draft = eagle_models.write_eagle3(folder / "d.gguf", "qwen3moe")
    return RunOptions(model=target, draft=draft, spec_type="draft-eagle3", stock=True)


def head(folder: Path) -> RunOptions:
    model = head_models.write_headed(folder / "t.gguf", head_models.WITH_HEADS[0], 1)
    return RunOptions(model=model, spec_type="draft-mtp", stock=True)


def two_heads(folder: Path) -> RunOptions:
    model = head_models.write_headed(folder / "t.gguf", "step35", 2)
    return RunOptions(model=model, spec_type="ngram-simple,draft-mtp", stock=True)


class Paused(LibraryDrafter):
    """Drafts for some tokens, does not for some, and notes all it does."""

    def begin_notes(self) -> None:
        self.drafts: dict[tuple[int, ...], list[int]] = {}  # by the text before
        self.held: list[int] = []  # tokens that the draft's context has in a pause

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        is_paused = len(tokens) // N_PAUSE % 2 == 1
        found = super().draft(tokens, 0 if is_paused else n_max)
        if is_paused:
            self.held.append(int(lib.llama_memory_seq_pos_max(self.context.memory, 0)))
        else:
            self.drafts[tuple(tokens)] = found.tokens
        return found


class AtOnce(Paused):
    """Looks at every batch, as llama.cpp has it."""

    def accept(self, n: int) -> None:
        self.handle.process(self._batch, self._pos)
        if len(self._batch) > 1:
            self.handle.accept(n)


def generate(options: RunOptions, kind: type[Paused]) -> tuple[Paused, list[int], list[list[int]]]:
    """(drafter with its notes, prompt, outputs of two turns)."""
    with Session(replace(options, n_predict=100, n_threads=1, draft_max=2, n_ctx=300)) as session:
        drafter = session.drafter
        drafter.__class__ = kind
        assert isinstance(drafter, Paused)
        drafter.begin_notes()
        prompt = session.tokenize(PROMPT)
        first = session.generate(prompt).token_ids
        # the next turn goes on in the middle of a pause
        second = session.generate([*prompt, *first[:30], 40, 41]).token_ids
    return drafter, prompt, [first, second]


@pytest.mark.parametrize("make", [simple, eagle, head, two_heads])
def test_drafts_after_a_pause_are_those_without_one(
    tmp_path: Path, make: Callable[[Path], RunOptions]
) -> None:
    options = make(tmp_path)
    deferred, prompt, outputs = generate(options, Paused)
    at_once, _, same = generate(options, AtOnce)
    assert outputs == same
    both = deferred.drafts.keys() & at_once.drafts.keys()  # a draft that differs is another place of the next
    assert len(both) > 0.8 * len(at_once.drafts)
    alike = sum(deferred.drafts[text] == at_once.drafts[text] for text in both) / len(both)
    assert alike > 0.9  # near ties: a wide batch rounds otherwise; with wrong states it is 0.8 at most
    assert sum(len(tokens) for tokens in deferred.drafts.values()) > 50
    assert margins(options.model, prompt, outputs[0]).max() < NEAR_TIE
    # in a pause nothing is read
    assert len(set(deferred.held)) <= 8 < len(deferred.held) / 4
    assert len(set(at_once.held)) > 20


def test_texts_that_go_back_into_a_pause(tmp_path: Path) -> None:
    """Handles of a draft model alone: what was deferred is cut, and prompts are read with it."""
    options = simple(tmp_path)
    options = replace(options, n_threads=1, draft_max=4)
    with Session(options) as session:
        assert isinstance(session.drafter, LibraryDrafter)
        handle = session.drafter.handle
        text = [5 + i % 7 for i in range(40)]

        def fresh(tokens: Sequence[int]) -> list[int]:
            handle.begin(0)
            handle.process(tokens[:-1], 0)
            return handle.draft(tokens[-1], len(tokens) - 1, 4)

        wanted = fresh(text[:40]), fresh([*text[:20], 9, 9, 9])
        handle.begin(0)
        handle.process(text[:10], 0)
        for i in range(10, 39):
            handle.defer(text[i], i)
        assert handle.draft(text[39], 39, 4) == wanted[0]
        handle.begin(0)
        handle.process(text[:10], 0)
        for i in range(10, 30):
            handle.defer(text[i], i)
        assert handle.begin(20) == 20
        handle.process([9, 9], 20)  # a prompt's piece
        assert handle.draft(9, 22, 4) == wanted[1]
        handle.begin(0)
        n_ctx = session.drafter.context.n_ctx
        for i in range(n_ctx + 10):
            handle.defer(5 + i % 7, i)
        assert handle.draft(9, n_ctx + 10, 4) == []
        with pytest.raises(EngineError, match="none may be left out"):
            handle.defer(9, n_ctx + 12)
