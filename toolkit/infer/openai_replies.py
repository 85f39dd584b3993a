"""The JSON of answers, whole and streamed, for the two endpoints that generate."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReplyForm:
    """Identity of one answer; knows its JSON. `chat` chooses between the two endpoints' forms."""

    model: str
    fingerprint: str
    chat: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}")

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [choice],
            "usage": usage,
        }

    def first(self, with_usage: bool) -> list[str]:
        """Events that open a stream: a chat says who speaks."""
        return [self._event({"role": "assistant", "content": ""}, None, with_usage)] if self.chat else []

    def piece(self, text: str, with_usage: bool) -> str:
        """One event with new text."""
        return self._event({"content": text} if self.chat else text, None, with_usage)

    def last(self, finish_reason: str, usage: dict[str, Any] | None) -> list[str]:
        """Events that close a stream; `usage` None when the client did not ask for it."""
        events = [self._event({} if self.chat else "", finish_reason, usage is not None)]
        if usage is not None:
            events.append(sse({**self._head(self._chunk_object), "choices": [], "usage": usage}))
        return [*events, "data: [DONE]\n\n"]

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _event(self, delta: Any, finish_reason: str | None, with_usage: bool) -> str:
        content = {"delta": delta} if self.chat else {"text": delta}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        body = {**self._head(self._chunk_object), "choices": [choice]}
        return sse({**body, "usage": None} if with_usage else body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def sse(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"
