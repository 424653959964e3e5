"""Which part of an answer is the model's reasoning: text in, as it comes; (text, whether it is) out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# how models mark it; gpt-oss writes to channels, of which "final" is the answer
PAIRS: Final = (
    ("<think>", "</think>"),
    ("<|channel|>", "final<|message|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
TAGS: Final = tuple(tag for pair in PAIRS for tag in pair)


class Reasoning:
    """Tells reasoning from answer; a tag may come in pieces, and counts as reasoning itself."""

    def __init__(self, end: str = "") -> None:
        """`end`: the tag that ends what the template has begun; "": nothing was."""
        self._end = end
        self._rest = ""

    def feed(self, part: str, *, is_last: bool = False) -> Iterator[tuple[str, bool]]:
        """What can be told now; what may be the beginning of a tag is held back."""
        text, self._rest = self._rest + part, ""
        while tag := self._first_tag(text):
            before, _, text = text.partition(tag)
            if self._end:
                self._end = ""
                yield before + tag, True
            else:
                self._end = dict(PAIRS)[tag]
                yield before, False
                yield tag, True
        n_held = 0 if is_last else max(_n_begun(text, tag) for tag in self._tags())
        self._rest = text[len(text) - n_held :]
        yield text[: len(text) - n_held], bool(self._end)

    def _tags(self) -> tuple[str, ...]:
        return (self._end,) if self._end else tuple(dict(PAIRS))

    def _first_tag(self, text: str) -> str | None:
        found = [tag for tag in self._tags() if tag in text]
        return min(found, key=text.index, default=None)


def end_of_begun(prompt: str) -> str:
    """The tag that ends the reasoning that a template has begun; "": it has begun none."""
    return next((end for begin, end in PAIRS if prompt.rstrip().endswith(begin)), "")


def without_reasoning(text: str, end: str = "") -> str:
    """The answer alone; `end`: as of `Reasoning`."""
    return "".join(part for part, is_reasoning in Reasoning(end).feed(text, is_last=True) if not is_reasoning)


def _n_begun(text: str, tag: str) -> int:
    """How many of the last characters may be the beginning of `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
