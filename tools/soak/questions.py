"""The questions of the soak: every prompt at both endpoints, without and with each LoRA adapter."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

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


def all_questions(n_adapters: int, seed: int) -> list[Question]:
    """Every prompt at both endpoints, without and with each adapter; lengths by chance."""
    rng = random.Random(seed)
    return [
        Question(prompt, is_chat, rng.choice((16, 32, 64)), adapter)
        for prompt in PROMPTS
        for is_chat in (False, True)
        for adapter in (None, *range(n_adapters))
    ]
