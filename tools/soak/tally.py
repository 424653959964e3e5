"""The books of the soak: every question that was asked comes to one of the ends."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

from tools.soak.asker import Asker
from tools.soak.questions import Answer, Question

N_EXAMPLES: Final = 20  # of what went wrong, kept for the report


@dataclass(slots=True)
class Tally:
    """What came of the answers; every thread may write."""

    n_asked: int = 0
    n_complete: int = 0  # and right
    n_cut: int = 0  # on purpose
    n_lost: int = 0
    n_different: int = 0
    n_tokens: int = 0  # of complete answers, at most: what was asked for
    examples: list[str] = field(default_factory=list)  # the first that went wrong
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self) -> None:
        with self._lock:
            self.n_asked += 1

    def cut(self) -> None:
        with self._lock:
            self.n_cut += 1

    def complete(self, question: Question) -> None:
        with self._lock:
            self.n_complete += 1
            self.n_tokens += question.n_tokens

    def lost(self, text: str) -> None:
        with self._lock:
            self.n_lost += 1
        self._keep(f"lost: {text}")

    def different(self, text: str) -> None:
        with self._lock:
            self.n_different += 1
        self._keep(f"different: {text}")

    def _keep(self, text: str) -> None:
        with self._lock:
            if len(self.examples) < N_EXAMPLES:
                self.examples.append(text)

    @property
    def is_balanced(self) -> bool:
        """Every question that was asked has come to one of the ends."""
        return self.n_asked == self.n_complete + self.n_cut + self.n_lost + self.n_different


def ask_and_compare(
    asker: Asker, question: Question, expected: Answer, tally: Tally, *, is_streamed: bool, **more: Any
) -> bool:
    """Ask, and book what came; whether an answer did."""
    tally.asked()
    how = f"{'chat' if question.is_chat else 'completion'}{', streamed' if is_streamed else ''}"
    name = f"{question.prompt!r} ({how}, adapter {question.adapter}, {question.n_tokens} tokens)"
    try:
        answer = asker.ask(question, is_streamed=is_streamed, **more)
    except Exception as error:  # whatever it is, the answer is lost
        tally.lost(f"{name}: {type(error).__name__}: {error}")
        return False
    if answer.finish_reason is None:
        tally.lost(f"{name}: the stream ended after {answer.text!r}")
        return False
    if answer != expected:
        tally.different(f"{name}: {answer.text!r} ({answer.finish_reason}), not {expected.text!r}")
    else:
        tally.complete(question)
    return True
