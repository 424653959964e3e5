"""One server, asked through OpenAI's package."""

from __future__ import annotations

from typing import Any, Final

import openai

from tools.soak.questions import Answer, Question, adapter_scales

TIMEOUT_S: Final = 180.0
# both sides close a connection that is idle for 5 s: a request may be sent just then, and be lost
HEADERS: Final = {"Connection": "close"}


class Asker:
    """Asks one server; every thread may use it."""

    def __init__(self, url: str, *, n_adapters: int, adapter_slot: int) -> None:
        """Requests with an adapter go to the server slot `adapter_slot`, others to any."""
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0, default_headers=HEADERS
        )
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
            messages: Any = [{"role": "user", "content": question.prompt}]
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
