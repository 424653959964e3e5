"""Which flags are pyspac's and which llama-server's."""

from __future__ import annotations

import pytest

from pyspac.commands.passing import split_arguments

FLAGS = {"-m", "--model", "-p", "-f", "--stock", "-n", "-c", "--n-predict"}
WITH_VALUE = FLAGS - {"--stock"}

CASES: dict[str, tuple[str, str, str]] = {
    "all ours": ("-m a --stock -p x", "-m a --stock -p x", ""),
    "theirs with a value": ("-m a --temp 0 -p x", "-m a -p x", "--temp 0"),
    "theirs without one": ("--jinja -m a", "-m a", "--jinja"),
    "with a sign of equality": ("--model=a --temp=0", "--model=a", "--temp=0"),
    "not -f a": ("-fa on -f x", "-f x", "-fa on"),
    "not -c tk": ("-ctk q8_0 -m a", "-m a", "-ctk q8_0"),
    "a value like a flag": ("-p --temp -m a", "-p --temp -m a", ""),
    "a number below 0": ("--seed -1 -n -1", "-n -1", "--seed -1"),
    "a number that is attached": ("-n5 -ngl 9 -c4k", "-n5 -c4k", "-ngl 9"),
    "stdin": ("-f - -m a", "-f - -m a", ""),
    "several values": ("--lora a b -m c", "-m c", "--lora a b"),
    "a model behind a value": ("--temp 0 a.gguf -n 1", "a.gguf -n 1", "--temp 0"),
    "a name behind a value": ("--temp 0 me/model:Q4_K_M", "me/model:Q4_K_M", "--temp 0"),
    "a model as the value": ("--lora a.gguf -m c", "-m c", "--lora a.gguf"),
    "behind --": ("-m a -- -m b --x", "-m a", "-m b --x"),
    "-- as a value": ("-p -- -m a", "-p -- -m a", ""),
    "a word of nobody's": ("word -m a", "word -m a", ""),
}


@pytest.mark.parametrize(("given", "ours", "theirs"), CASES.values(), ids=list(CASES))
def test_split(given: str, ours: str, theirs: str) -> None:
    assert split_arguments(given.split(), FLAGS, WITH_VALUE) == (ours.split(), theirs.split())
