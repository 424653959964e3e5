"""What plain llama-server answers, as far as it is certain.

A greedy answer is the same at every try only where no choice is close: the width of a batch changes which
kernels run and with it the rounding, in llama.cpp as well. So plain llama-server, without the engine and
without drafts, answers every question first, with the logits of its choices; an answer is then asked for only
as far as the best token is at least `MIN_MARGIN` ahead of the second. What is left must come to the letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from tools.soak.asker import Asker
from tools.soak.questions import Answer, Question

# rounding moves a logit by less than 0.001 (tests/near_ties.py); the rest is for routers, whose own ties
# are not seen here
MIN_MARGIN: Final = 0.05
MIN_TOKENS: Final = 6  # shorter answers say too little


def margins(choice: Any) -> list[float]:
    """How far the chosen token of each place is ahead of the best other one, in logits."""
    places = choice.logprobs.content
    found = []
    for place in places:
        place = place if isinstance(place, dict) else place.model_dump()
        best = sorted((top["logprob"] for top in place["top_logprobs"]), reverse=True)
        found.append(best[0] - best[1])
    return found


def n_certain(margins_of_answer: Sequence[float], least: float = MIN_MARGIN) -> int:
    """Tokens before the first choice that is closer than `least`."""
    for index, margin in enumerate(margins_of_answer):
        if margin < least:
            return index
    return len(margins_of_answer)


def certain_part(asker: Asker, question: Question) -> Question | None:
    """The question, asking for no more tokens than are certain; None: too few are."""
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if question.is_chat else {"logprobs": 2}
    choice = asker.open(question, **more).choices[0]
    n_tokens = n_certain(margins(choice))  # an early end is a choice without margin: left out as well
    return replace(question, n_tokens=n_tokens) if n_tokens >= MIN_TOKENS else None


def find_references(asker: Asker, questions: Iterable[Question]) -> dict[Question, Answer]:
    """What plain llama-server answers, as far as it is certain."""
    parts = [part for question in questions if (part := certain_part(asker, question)) is not None]
    return {part: asker.ask(part, is_streamed=False) for part in dict.fromkeys(parts)}
