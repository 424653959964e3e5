"""A chat's template: `pyspac chat` makes the same text of it as llama-server does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from serving import ONE_THREAD, TARGET, llama_server, post

from pyspac.generate.chat_template import ChatTemplate, Message
from pyspac.model.gguf_header import read_header

# it knows no system message, has a switch for thinking, and forgets what was thought but in the last answer
TEMPLATE = """{{- bos_token -}}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and '</think>' in m.content and not loop.last
    and not (preserve_thinking is defined and preserve_thinking) -%}
<|assistant|>{{ m.content.split('</think>')[-1] }}
{%- else -%}
<|{{ m.role }}|>{{ m.content | trim }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '<think></think>' if enable_thinking is defined and not enable_thinking }}
{%- endif -%}
"""
USER, SYSTEM = Message("user", " ä <b>\n 'x' \"y\" "), Message("system", "Be brief.")
CHATS = (
    [USER],
    [SYSTEM, USER],
    [USER, Message("assistant", "<think>hm</think>Yes"), Message("user", "Why?")],
)


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["thinking", "the model's"])
def test_as_llama_server_makes_it(bin_dir: Path, tmp_path: Path, template: str | None) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(template or "")
    flags = ("--chat-template-file", str(file)) if template else ()
    ours = ChatTemplate(read_header(TARGET), file if template else None)
    with llama_server(bin_dir, tmp_path, *ONE_THREAD, "-c", "256", *flags, draft=False) as port:
        for chat in CHATS:
            body = {"messages": [asdict(message) for message in chat]}
            assert ours.text(chat) == post(port, "/apply-template", body)["prompt"]
