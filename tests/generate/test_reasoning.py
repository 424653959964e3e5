"""Reasoning and answer: how models mark them, and what of it stays in a chat."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pyspac.generate.chat import Conversation, Message
from pyspac.generate.decode import Generation
from pyspac.generate.reasoning import PAIRS, Reasoning, end_of_begun, without_reasoning
from pyspac.generate.vocab import TextStream

HARMONY = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello"


def shown(text: str, n: int, end: str = "") -> tuple[str, str]:
    """What is shown as the answer, and what as reasoning, where `n` characters come at a time."""
    reasoning = Reasoning(end)
    pairs = [pair for i in range(0, len(text), n) for pair in reasoning.feed(text[i : i + n])]
    pairs += reasoning.feed("", is_last=True)
    answer, thought = (
        "".join(part for part, is_dim in pairs if is_dim == wanted) for wanted in (False, True)
    )
    return answer, thought


@pytest.mark.parametrize("n", [1, 2, 3, 100])
def test_reasoning_is_told_from_the_answer(n: int) -> None:
    text = "a < b <think>why\nnot</think>\n\nyes <thin"
    assert shown(text, n) == ("a < b \n\nyes <thin", "<think>why\nnot</think>")
    assert shown("why</think>yes", n, "</think>") == ("yes", "why</think>")
    assert shown(HARMONY, n) == ("Hello", HARMONY.removesuffix("Hello"))
    assert shown("<|channel|>final<|message|>Hello", n)[0] == "Hello"
    for begin, end in PAIRS:
        assert shown(f"{begin}a{end}b", n) == ("b", f"{begin}a{end}")


def test_reasoning_that_the_template_begins() -> None:
    assert end_of_begun("assistant\n<think>\n") == "</think>"
    assert end_of_begun("<|start|>assistant") == ""
    assert without_reasoning("why[/THINK]yes", "[/THINK]") == "yes"


class Vocab:
    """Of words, of which those in <|...|> are control tokens."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        words = text.replace("<|", " <|").replace("|>", "|> ").split(" ")
        self.words += [word for word in words if word and word not in self.words]
        return [self.words.index(word) for word in words if word]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        word = self.words[token]
        return b"" if word.startswith("<|") and not special else word.encode()


class FakeSession:
    """Answers with `answer`, whatever is asked."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.model = SimpleNamespace(vocab=Vocab())

    def text_stream(self, tags: Sequence[str] = ()) -> TextStream:
        return TextStream(self.model.vocab, tags)

    def generate(self, prompt: list[int], on_token: Any, interrupt: Any) -> Generation:
        tokens = self.model.vocab.tokenize(self.answer)
        for token in tokens:
            on_token(token)
        return Generation(token_ids=tokens)


class Template:
    """As gpt-oss's, which refuses an answer with a channel in it."""

    def text(self, messages: Sequence[Message]) -> str:
        assert not any("<|channel|>" in message.content for message in messages)
        return "".join(f"{message.role}:{message.content}\n" for message in messages)

    def tokens(self, text: str, vocab: Vocab) -> list[int]:
        return vocab.tokenize(text)


def test_channels_are_seen_and_are_no_part_of_the_history() -> None:
    conversation = Conversation(FakeSession(HARMONY), Template())  # type: ignore[arg-type]
    parts: list[str] = []
    turn = conversation.ask("hi", parts.append)
    assert "".join(parts) == turn.text == HARMONY.replace("<|end|><|start|>", "")
    assert conversation._messages[-1].content == "Hello"
    conversation.ask("again")  # the template refuses nothing
