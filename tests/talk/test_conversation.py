"""Conversations with a server: what it keeps from turn to turn, and what fails and is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from serving import DRAFT, TARGET

from pyspac.commands.server_options import own_options
from pyspac.errors import PyspacError
from pyspac.talk.answer import Answer
from pyspac.talk.client import RefusedError
from pyspac.talk.conversation import Conversation
from pyspac.talk.interrupt import Interrupt
from pyspac.talk.own_server import OwnServer

TEMPLATE = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}{{ '# assistant\n' }}"
ONE_MESSAGE = (
    "{% if messages | length > 1 %}{{ raise_exception('One message alone') }}{% endif %}"
    "{{ messages[0]['content'] }}"
)
QUESTIONS = ("def parse(self):", "class Reader:", "import os")
FLAGS = ("-t", "1", "--temp", "0")
N = 12


def ask(conversation: Conversation, question: str) -> Answer:
    return conversation.ask(question, lambda text: None, lambda text: None, Interrupt())


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    template = tmp_path_factory.mktemp("t") / "t.jinja"
    template.write_text(TEMPLATE)
    options = own_options(
        {"model": TARGET, "ctx_size": 512, "device": "none"}, [*FLAGS, "--chat-template-file", str(template)]
    )
    with OwnServer(options) as server:
        yield server


@pytest.mark.model
@pytest.mark.parametrize(
    "fields",
    [{"device": "none"}, {"stock": True}, {"model_draft": DRAFT, "draft_max": 3, "device": "none"}],
    ids=["plain", "stock", "draft"],
)
def test_only_new_tokens_are_processed(fields: dict[str, object]) -> None:
    """And answers are those to the whole conversation, read anew.

    In pieces of 8 tokens: from 16 on the engine has panels, which round otherwise (docs/host-experts.md).
    """
    flags = [*FLAGS, "-ub", "8"]
    with OwnServer(own_options({"model": TARGET, "ctx_size": 512} | fields, flags)) as own:
        conversation = Conversation(own.client, n_predict=N)
        answers = [ask(conversation, question) for question in QUESTIONS]
        assert answers[0].n_cached == 0
        for before, now in pairwise(answers):
            n_held = before.n_prompt + N
            assert n_held - 4 <= now.n_cached <= n_held  # but for the last tokens, which were not computed
            assert now.n_prompt - now.n_cached < 30
        messages = [
            message
            for question, answer in zip(QUESTIONS, answers, strict=True)
            for message in (
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer.text},
            )
        ][:-1]
        prompt = own.client.post("/apply-template", {"messages": messages})["prompt"]
        again = own.client.post("/completion", {"prompt": prompt, "n_predict": N, "cache_prompt": False})
        assert again["content"] == answers[-1].text


def test_a_new_chat_forgets(own: OwnServer) -> None:
    conversation = Conversation(own.client, system="be brief", n_predict=4)
    first = ask(conversation, "def f():")
    ask(conversation, "more")
    conversation.clear()
    assert conversation.n_held == 0
    again = ask(conversation, "def f():")
    assert (again.text, again.n_prompt) == (first.text, first.n_prompt)
    conversation.set_system(None)
    assert ask(conversation, "def f():").n_prompt < first.n_prompt
    assert len(conversation.answers) == 1


def test_what_fails_is_forgotten(own: OwnServer) -> None:
    conversation = Conversation(own.client, n_predict=4)
    first = ask(conversation, "x")
    with pytest.raises(RefusedError, match="exceeds the available context size") as refused:
        ask(conversation, "word " * 2000)
    assert refused.value.exit_code == 2
    with pytest.raises(PyspacError):
        ask(conversation, "caf\udcff")  # half of a character
    assert ask(conversation, "y").n_prompt < first.n_prompt + 40
    assert len(conversation.answers) == 2


def test_a_full_context_says_so(own: OwnServer) -> None:
    conversation = Conversation(own.client)
    conversation.settings["ignore_eos"] = True
    answer = ask(conversation, "x")
    assert answer.stop_reason == "context"
    assert conversation.n_ctx - 2 <= conversation.n_held <= conversation.n_ctx


def test_a_full_context_forgets_the_oldest_turns(own: OwnServer) -> None:
    """Twenty turns of 60 tokens do not fit into 512; each is answered, and the youngest are still there."""
    conversation = Conversation(own.client, system="be brief", n_predict=40)
    for i in range(20):
        answer = ask(conversation, f"question {i}: " + "word " * 8)
        assert answer.n_tokens > 0
        assert conversation.n_held <= conversation.n_ctx
    texts = [message["content"] for message in conversation._messages]
    assert conversation.n_forgotten > 0
    assert len(texts) == 2 * (20 - conversation.n_forgotten)
    assert texts[-2].startswith("question 19")
    assert not any(text.startswith("question 0:") for text in texts)
    n_forgotten = conversation.n_forgotten
    with pytest.raises(RefusedError, match="exceeds the available context size"):
        ask(conversation, "word " * 2000)
    assert [message["content"] for message in conversation._messages] == texts  # nothing goes for nothing
    assert conversation.n_forgotten == n_forgotten
    conversation.clear()
    assert conversation.n_forgotten == 0


def test_a_template_that_refuses_messages(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(ONE_MESSAGE)
    flags = [*FLAGS, "--chat-template-file", str(template)]
    with OwnServer(own_options({"model": TARGET, "stock": True}, flags)) as own:
        conversation = Conversation(own.client, n_predict=4)
        ask(conversation, "a")
        with pytest.raises(RefusedError, match="One message alone"):
            ask(conversation, "b")


def test_zeros_cut_nothing_off(own: OwnServer) -> None:
    messages = [{"role": "user", "content": "a\0b"}]
    assert own.client.post("/apply-template", {"messages": messages})["prompt"] == (
        "# user\na\0b\n# assistant\n"
    )
