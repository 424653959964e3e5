"""Conversations: the template, and what the context keeps from turn to turn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT

from pyspac.errors import ConfigError, ModelError, PyspacError
from pyspac.generate.chat import Conversation
from pyspac.generate.chat_template import ChatTemplate, Message
from pyspac.generate.decode import PromptError
from pyspac.generate.options import RunOptions
from pyspac.generate.session import Session
from pyspac.model.gguf_header import GgufHeader, read_header

MODELS = ROOT / "pyspac/models"
TARGET, DRAFT = MODELS / "demo-moe.gguf", MODELS / "demo-draft.gguf"
TEMPLATE = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}{{ '# assistant\n' }}"


def header_with(**values: object) -> GgufHeader:
    header = read_header(TARGET)
    names = {name: f"tokenizer.{name.replace('__', '.')}" for name in values}
    return GgufHeader(
        header.path, header.metadata | {names[name]: value for name, value in values.items()}, ()
    )


def test_the_models_own_template() -> None:
    template = ChatTemplate(header_with(chat_template=TEMPLATE))
    text = template.text([Message("system", "s"), Message("user", "u")])
    assert text == "# system\ns\n# user\nu\n# assistant\n"
    assert not template.is_fallback


def test_a_model_without_a_template_has_chatml() -> None:
    header = read_header(DRAFT)
    bare = GgufHeader(
        header.path, {k: v for k, v in header.metadata.items() if k != "tokenizer.chat_template"}, ()
    )
    template = ChatTemplate(bare)
    assert template.is_fallback
    assert template.text([Message("user", "u")]) == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def test_another_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}")
    assert ChatTemplate(read_header(TARGET), file).text([Message("user", "u")]).endswith("u")
    file.write_text("")
    with pytest.raises(ModelError, match=r"cannot be used \(it is empty"):
        ChatTemplate(read_header(TARGET), file)
    file.write_text("{{ '' }}")
    with pytest.raises(ModelError, match=r"cannot be used \(it makes no text"):
        ChatTemplate(read_header(TARGET), file)
    file.write_text("{% for %}")
    with pytest.raises(ModelError, match=r"t\.jinja: the chat template cannot be used.*--chat-template-file"):
        ChatTemplate(read_header(TARGET), file)
    with pytest.raises(ConfigError, match="--chat-template-file cannot be"):
        ChatTemplate(read_header(TARGET), tmp_path / "missing")


def test_zeros_cut_nothing_off(tmp_path: Path) -> None:
    template = ChatTemplate(header_with(chat_template=TEMPLATE))
    text = template.text([Message("user", "a\0b"), Message("assistant", "c"), Message("user", "d")])
    assert text == "# user\na\0b\n# assistant\nc\n# user\nd\n# assistant\n"
    (tmp_path / "t.jinja").write_text("a\0{{ messages[0].content }}")
    with pytest.raises(ModelError, match="it holds zero bytes"):
        ChatTemplate(read_header(TARGET), tmp_path / "t.jinja")


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ messages", "{{ 1 // 0 }}"])
def test_a_template_that_is_none_says_why(source: str) -> None:
    with pytest.raises(ModelError, match=r"cannot be used \((?!std::exception).+\)"):
        ChatTemplate(header_with(chat_template=source))


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if messages | length > 1 %}{{ raise_exception('One message alone') }}{% endif %}"
    "{{ messages[0]['content'] }}"
)


def test_what_a_template_says_is_cut_once() -> None:
    """llama.cpp's words before it, and none of its own."""
    source = "{{ raise_exception('Jinja Exception: two') }}"
    with pytest.raises(ModelError, match=r"\(Jinja Exception: two\)"):
        ChatTemplate(header_with(chat_template=source))


def test_half_of_a_character_is_no_message() -> None:
    template = ChatTemplate(header_with(chat_template=TEMPLATE))
    with pytest.raises(PyspacError, match=r"a message has half of a character, U\+DCFF, behind 'caf'"):
        template.text([Message("user", "caf\udcff")])
    with Session(RunOptions(model=TARGET, n_predict=4, n_threads=1)) as session:
        with pytest.raises(PyspacError, match=r"the text has half of a character, U\+D83D, behind ''"):
            session.tokenize("\ud83d")
        conversation = Conversation(session, template)
        with pytest.raises(PyspacError, match="half of a character"):
            conversation.ask("\udcff")
        assert conversation.ask("x").text  # what failed is forgotten


def test_a_template_that_refuses_messages() -> None:
    template = ChatTemplate(header_with(chat_template=NO_SYSTEM))
    with pytest.raises(ModelError, match=r"refuses what was said \(One message alone\)"):
        template.text([Message("user", "a"), Message("user", "b")])


def test_a_system_message_that_the_template_does_not_take() -> None:
    """llama.cpp lets the user say it."""
    template = ChatTemplate(header_with(chat_template=NO_SYSTEM))
    assert template.text([Message("system", "s"), Message("user", "u")]) == "s\nu"


QUESTIONS = ("def parse(self):", "class Reader:", "import os")


def answers(options: RunOptions) -> tuple[list[str], list[tuple[int, int]], list[int]]:
    """Of a conversation: the texts, (processed, kept) of each turn, and the tokens of the last prompt."""
    with Session(options) as session:
        conversation = Conversation(session, ChatTemplate(header_with(chat_template=TEMPLATE)))
        turns = [conversation.ask(question) for question in QUESTIONS]
        n = len(conversation._tokens) - len(turns[-1].generation.token_ids)
        prompt = conversation._tokens[:n]
    return [turn.text for turn in turns], [(turn.n_processed, turn.n_kept) for turn in turns], prompt


@pytest.mark.model
@pytest.mark.parametrize(
    "fields",
    [{}, {"stock": True}, {"draft": DRAFT, "draft_max": 3}, {"spec_type": "ngram", "draft_max": 3}],
    ids=["plain", "stock", "draft", "ngram"],
)
def test_only_new_tokens_are_processed(fields: dict[str, object]) -> None:
    """And the answers are those of a model that reads everything anew."""
    options = RunOptions(model=TARGET, n_predict=12, n_threads=1, n_ctx=512, **fields)  # type: ignore[arg-type]
    texts, counts, prompt = answers(options)
    assert counts[0][1] == 0
    for before, now in pairwise(counts):
        n_all = sum(before) + 12
        assert n_all - 4 <= now[1] <= n_all  # but for the last tokens, which were not computed
        assert now[0] < 30
    with Session(options) as session:
        again = session.generate(prompt)
        assert again.metrics.n_cached == 0
        assert session.model.vocab.detokenize(again.token_ids) == texts[-1]


@pytest.mark.model
def test_another_prompt_keeps_what_they_begin_with() -> None:
    with Session(RunOptions(model=TARGET, n_predict=4, n_threads=1, n_ctx=512)) as session:
        first = session.tokenize("def parse(self, text):\n    return text\n")
        session.generate(first)
        second = session.generate([*first[:6], *session.tokenize("import os\n")])
        assert second.metrics.n_cached == 6
        again = session.generate(first)
        assert again.metrics.n_cached == 6
        assert session.generate(first).metrics.n_cached == len(first) - 1  # the last one gives the logits


@pytest.mark.model
def test_a_prompt_that_is_too_long_costs_nothing() -> None:
    with Session(RunOptions(model=TARGET, n_predict=4, n_threads=1, n_ctx=64)) as session:
        first = session.tokenize("def parse(self, text):\n    return text\n")
        session.generate(first)
        with pytest.raises(PromptError, match="the context only 64"):
            session.generate(first[:1] * 64)
        assert session.generate(first).metrics.n_cached == len(first) - 1


@pytest.mark.model
def test_a_new_chat_forgets() -> None:
    with Session(RunOptions(model=TARGET, n_predict=4, n_threads=1, n_ctx=512)) as session:
        conversation = Conversation(session, ChatTemplate(header_with(chat_template=TEMPLATE)))
        first = conversation.ask("def f():")
        conversation.clear()
        assert conversation.ask("def f():").text == first.text
        assert len(conversation.turns) == 1


@pytest.mark.model
def test_a_closed_session_says_so() -> None:
    """The context is freed: asking it would read freed memory."""
    session = Session(RunOptions(model=TARGET, device="none", n_threads=1, n_predict=1))
    prompt = session.tokenize("import os")
    session.generate(prompt)
    session.close()
    with pytest.raises(PyspacError, match="this session is closed"):
        session.generate(prompt)
