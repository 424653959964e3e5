"""One answer of a server: a request in; text as it comes, and what it took, out.

TTFT is the time from the request to the first token; TPOT = (end-to-end - TTFT) / (tokens - 1); TPS = 1 /
TPOT, so prompt processing is not in it. Times are this process's: what a user waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pyspac.engine.step import StepTotals
from pyspac.errors import UsageError
from pyspac.talk.client import Client
from pyspac.talk.interrupt import Interrupt

StopReason = Literal["eog", "length", "context", "stop", "interrupted"]
OnText = Callable[[str], None]
_STOPS: Final[dict[str, StopReason]] = {"eos": "eog", "word": "stop", "limit": "length"}
_MS_TO_US: Final = 1000.0


@dataclass(slots=True, kw_only=True)
class Answer:
    """`*_s` are seconds of `time.perf_counter()`; `timings` are the server's."""

    text: str = ""
    reasoning: str = ""  # of a chat's answer: what the model thought first
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of a completion
    stop_reason: StopReason = "interrupted"
    n_tokens: int = 0  # generated, without the end token
    n_prompt: int = 0
    n_cached: int = 0  # of the prompt: were in the context before
    seed: int | None = None
    timings: dict[str, Any] = field(default_factory=dict)
    start_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    def mark(self, n_tokens: int = 1) -> None:
        """So many tokens came now."""
        self.last_token_s = time.perf_counter()
        if not self.n_tokens:
            self.first_token_s = self.last_token_s
        self.n_tokens += n_tokens

    @property
    def totals(self) -> StepTotals:
        """Sums over the steps after the first token, as the server counted them.

        Each step yields its accepted drafts and one token more; a last one that was cut counts whole.
        """
        n_accepted = int(self.timings.get("draft_n_accepted", 0))
        n_steps = int(self.timings.get("predicted_n", 0)) - 1 - n_accepted
        return StepTotals(
            n_steps=max(n_steps, 0),
            n_draft=int(self.timings.get("draft_n", 0)),
            n_accepted=n_accepted,
            draft_us=self.timings.get("draft_ms", 0.0) * _MS_TO_US,
            verify_us=self.timings.get("verify_ms", 0.0) * _MS_TO_US,
            process_us=self.timings.get("process_ms", 0.0) * _MS_TO_US,
        )

    @property
    def ttft_ms(self) -> float | None:
        """None before the first token."""
        return (self.first_token_s - self.start_s) * 1e3 if self.n_tokens else None

    @property
    def tpot_ms(self) -> float | None:
        """None with fewer than two tokens, or where all came at once."""
        if self.n_tokens < 2 or self.last_token_s == self.first_token_s:
            return None
        return (self.last_token_s - self.first_token_s) * 1e3 / (self.n_tokens - 1)

    @property
    def tps(self) -> float | None:
        return 1e3 / self.tpot_ms if self.tpot_ms else None

    def to_dict(self) -> dict[str, Any]:
        """The figures under their names in `--json`."""
        return {
            "n_tokens": self.n_tokens,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "tps": self.tps,
            **self.totals.to_dict(),
        }


def complete(
    client: Client,
    prompt: str,
    on_text: OnText,
    interrupt: Interrupt,
    settings: dict[str, Any] | None = None,
    on_first: Callable[[], None] = lambda: None,
) -> Answer:
    """What follows the plain text `prompt`. `settings`: of the request, as llama-server names them.

    `on_first` is called when the first token is there, or at the end. Raises RefusedError,
    LostError, or UsageError for an empty prompt.
    """
    body = {"prompt": prompt, "stream": True, "return_tokens": True, **(settings or {})}
    answer = Answer(start_s=time.perf_counter())
    with client.understood():
        for event in _events(client, "/completion", body, interrupt):
            if event["stop"]:
                _finish_completion(answer, event)
                break
            if event["tokens"]:
                is_first = not answer.n_tokens
                answer.mark(len(event["tokens"]))
                answer.token_ids += event["tokens"]
                if is_first:
                    on_first()
            answer.text += event["content"]
            on_text(event["content"])
    if not answer.n_tokens:
        on_first()
    return answer


def _finish_completion(answer: Answer, event: dict[str, Any]) -> None:
    if not event["tokens_evaluated"]:
        raise UsageError(
            "the prompt is empty and the model has no token to begin with; give a text with -p or -f"
        )
    answer.stop_reason = "context" if event["truncated"] else _STOPS[event["stop_type"]]
    if tokens := event["tokens"]:  # all of them: pieces that complete no character come with no other event
        answer.token_ids = tokens[:-1] if answer.stop_reason == "eog" else tokens
        if n_late := len(answer.token_ids) - answer.n_tokens:
            answer.mark(n_late)
    answer.n_prompt = event["tokens_evaluated"]
    answer.seed = event["generation_settings"].get("seed")
    _take_timings(answer, event)


def _take_timings(answer: Answer, event: dict[str, Any]) -> None:
    answer.timings = event.get("timings", {})
    answer.n_cached = answer.timings.get("cache_n", 0)


def chat(
    client: Client,
    messages: Iterable[dict[str, Any]],
    on_text: OnText,
    on_reasoning: OnText,
    interrupt: Interrupt,
    settings: dict[str, Any] | None = None,
) -> Answer:
    """The next message of a conversation. Raises RefusedError or LostError."""
    body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer(start_s=time.perf_counter())
    with client.understood():
        for event in _events(client, "/v1/chat/completions", body | (settings or {}), interrupt):
            if "timings" in event:
                _take_timings(answer, event)
                answer.n_prompt = answer.n_cached + answer.timings.get("prompt_n", 0)
            for choice in event["choices"]:
                _take_delta(answer, choice["delta"], on_text, on_reasoning)
                if (reason := choice.get("finish_reason")) is not None:
                    answer.stop_reason = "length" if reason == "length" else "eog"
    return answer


def _take_delta(answer: Answer, delta: dict[str, Any], on_text: OnText, on_reasoning: OnText) -> None:
    if thought := delta.get("reasoning_content"):
        answer.mark()
        answer.reasoning += thought
        on_reasoning(thought)
    if text := delta.get("content"):
        answer.mark()
        answer.text += text
        on_text(text)
    for call in delta.get("tool_calls", ()):
        answer.mark()
        _take_call(answer.tool_calls, call)


def _take_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """A call comes in parts: its name first, then pieces of its arguments."""
    while len(calls) <= part["index"]:
        calls.append({"id": "", "name": "", "arguments": ""})
    call, function = calls[part["index"]], part.get("function", {})
    call["id"] = part.get("id") or call["id"]
    call["name"] = function.get("name") or call["name"]
    call["arguments"] += function.get("arguments", "")


def _events(
    client: Client, path: str, body: dict[str, Any], interrupt: Interrupt
) -> Iterator[dict[str, Any]]:
    """As they come; Ctrl-C ends them, also one that came before the request."""
    with interrupt.cancels(client):
        if not interrupt:
            events = client.stream(path, body)
            yield from map(_without_token, events) if body.get("n_predict") == 0 else events


def _without_token(event: dict[str, Any]) -> dict[str, Any]:
    """Of no tokens at all llama-server makes one, which nobody asked for."""
    choices = [choice | {"delta": {}} for choice in event.get("choices", ())]
    return event | {"content": "", "tokens": [], "choices": choices}
