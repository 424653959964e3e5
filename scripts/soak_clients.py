"""The clients of the soak: questions with known answers, asked through OpenAI's package, and their books.

A greedy answer is the same at every try only where no choice is close: the width of a batch changes which
kernels run and with it the rounding, in llama.cpp as well. So plain llama-server, without the engine and
without drafts, answers every question first, with the logits of its choices; an answer is then asked for only
as far as the best token is at least `MIN_MARGIN` ahead of the second. What is left must come to the letter.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import openai

# rounding moves a logit by less than 0.001 (tests/test_near_ties.py); the rest is for routers, whose own ties
# are not seen here
MIN_MARGIN: Final = 0.05
MIN_TOKENS: Final = 6  # shorter answers say too little
TIMEOUT_S: Final = 180.0
N_EXAMPLES: Final = 20  # of what went wrong, kept for the report

# more tokens than --max-batch: the engine leaves its batch to llama.cpp
LONG_PROMPT: Final = (
    "class Counter:\n"
    "    def __init__(self, names):\n"
    "        self.counts = dict.fromkeys(names, 0)\n\n"
    "    def add(self, name, n=1):\n"
    "        if name not in self.counts:\n"
    "            raise KeyError(name)\n"
    "        self.counts[name] += n\n\n"
    "    def total(self):\n"
    "        return sum(self.counts.values())\n\n"
    "    def __len__(self):\n"
)
PROMPTS: Final = (
    "def parse(self, text):\n",
    "import os\nimport sys\n\n",
    "class Reader:\n    def __init__(self",
    "for i in range(",
    "def main(argv):\n    parser = ",
    'if __name__ == "__main__":\n',
    "try:\n    import json\nexcept ",
    "class Error(Exception):\n    ",
    "    def close(self):\n        ",
    "with open(path) as ",
    "def __enter__(self):\n        return ",
    "raise TypeError(",
    LONG_PROMPT,
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request, as far as it decides the answer."""

    prompt: str
    is_chat: bool
    n_tokens: int  # to ask for at most
    adapter: int | None = None  # index of the LoRA adapter that is on


@dataclass(frozen=True, slots=True)
class Answer:
    """Text, and why it ends; None: it did not."""

    text: str
    finish_reason: str | None


def adapter_scales(adapter: int | None, n_adapters: int) -> list[dict[str, float]]:
    """All adapters off but one, as `lora` of a request and POST /lora-adapters take it."""
    return [{"id": index, "scale": float(index == adapter)} for index in range(n_adapters)]


class Asker:
    """Asks one server; every thread may use it."""

    def __init__(self, url: str, *, n_adapters: int, adapter_slot: int) -> None:
        """Requests with an adapter go to the server slot `adapter_slot`, others to any."""
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0)
        self.n_adapters = n_adapters
        self.adapter_slot = adapter_slot

    def close(self) -> None:
        self.client.close()

    def open(self, question: Question, *, names_adapter: bool = True, **more: Any) -> Any:
        """The response of the endpoint. Without `names_adapter` those that the server has on answer."""
        extra: dict[str, Any] = {}
        if names_adapter:
            extra["lora"] = adapter_scales(question.adapter, self.n_adapters)
        if question.adapter is not None:
            extra["id_slot"] = self.adapter_slot
        extra |= more.pop("extra_body", {})
        request = {
            "model": "any", "max_tokens": question.n_tokens, "temperature": 0.0, "extra_body": extra, **more,
        }  # fmt: skip
        if question.is_chat:
            messages = [{"role": "user", "content": question.prompt}]
            return self.client.chat.completions.create(messages=messages, **request)
        return self.client.completions.create(prompt=question.prompt, **request)

    def ask(self, question: Question, *, is_streamed: bool, **more: Any) -> Answer:
        """The whole answer. Raises what the client raises: its own errors, and those of its HTTP library."""
        if not is_streamed:
            choice = self.open(question, **more).choices[0]
            text = choice.message.content if question.is_chat else choice.text
            return Answer(text or "", choice.finish_reason)
        text, reason = "", None
        with self.open(question, stream=True, **more) as stream:
            for chunk in stream:
                text += text_of(chunk)
                reason = reason_of(chunk) or reason
        return Answer(text, reason)


def text_of(chunk: Any) -> str:
    """Of one chunk of a stream, chat or completion."""
    if not chunk.choices:
        return ""
    choice = chunk.choices[0]
    text = choice.delta.content if hasattr(choice, "delta") else choice.text
    return text or ""


def reason_of(chunk: Any) -> str | None:
    """Why the answer ends, in the last chunk of a stream."""
    return chunk.choices[0].finish_reason if chunk.choices else None


# ---- references ----------------------------------------------------------------------------------


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


def all_questions(n_adapters: int, seed: int) -> list[Question]:
    """Every prompt at both endpoints, without and with each adapter; lengths by chance."""
    rng = random.Random(seed)
    return [
        Question(prompt, is_chat, rng.choice((16, 32, 64)), adapter)
        for prompt in PROMPTS
        for is_chat in (False, True)
        for adapter in (None, *range(n_adapters))
    ]


def find_references(asker: Asker, questions: Iterable[Question]) -> dict[Question, Answer]:
    """What plain llama-server answers, as far as it is certain."""
    parts = [part for question in questions if (part := certain_part(asker, question)) is not None]
    return {part: asker.ask(part, is_streamed=False) for part in dict.fromkeys(parts)}


# ---- books ---------------------------------------------------------------------------------------


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


class Clients:
    """So many threads, each asking one question after another until told to stop."""

    def __init__(
        self, asker: Asker, references: dict[Question, Answer], tally: Tally, *, n: int, seed: int
    ) -> None:
        self._asker, self._references, self._tally = asker, references, tally
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-client-{index}"),), daemon=True)
            for index in range(n)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Returns when the answers under way have come."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)

    def _run(self, rng: random.Random) -> None:
        questions = list(self._references)
        while not self._stop.is_set():
            question = rng.choice(questions)
            is_streamed = rng.random() < 0.5
            has_come = ask_and_compare(
                self._asker, question, self._references[question], self._tally, is_streamed=is_streamed
            )
            if not has_come:
                self._stop.wait(1)  # the server may be gone
            elif rng.random() < 0.1:
                self._stop.wait(rng.uniform(0, 0.5))  # else the queue is never empty


def ask_everything(asker: Asker, references: dict[Question, Answer], tally: Tally, n_clients: int) -> None:
    """Every question once whole and once streamed, by so many clients."""
    todo = [(question, is_streamed) for question in references for is_streamed in (False, True)]
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                question, is_streamed = todo.pop()
            ask_and_compare(asker, question, references[question], tally, is_streamed=is_streamed)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
