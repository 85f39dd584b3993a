"""The JSON of whole and streamed replies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReplyForm:
    """Identity and JSON form of one reply.

    chat: the form of /v1/chat/completions, else that of /v1/completions. with_usage: events of a stream have `usage`,
    null in all but the last. In the methods, index: the number of the answer among the request's n; logprobs:
    `choices[].logprobs`, None if the client did not ask for them.
    """

    model: str
    fingerprint: str
    chat: bool
    with_usage: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}")

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        head = self._head("chat.completion" if self.chat else "text_completion")
        return {**head, "choices": list(choices), "usage": usage}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One whole answer."""
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def first(self, index: int) -> list[str]:
        """Events that begin a streamed answer: the role in a chat, none otherwise."""
        return [self._event(index, {"role": "assistant", "content": ""}, None, None)] if self.chat else []

    def piece(self, index: int, text: str, logprobs: dict[str, Any] | None) -> str:
        """One event with new text."""
        return self._event(index, {"content": text} if self.chat else text, None, logprobs)

    def ended(self, index: int, finish_reason: str, logprobs: dict[str, Any] | None) -> str:
        """The event that ends an answer. logprobs: of its last tokens without text, if any."""
        return self._event(index, {} if self.chat else "", finish_reason, logprobs)

    def last(self, usage: dict[str, Any]) -> list[str]:
        """Events that end a stream."""
        used = [sse({**self._head(self._chunk_object), "choices": [], "usage": usage})] if self.with_usage else []
        return [*used, "data: [DONE]\n\n"]

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _event(self, index: int, delta: Any, finish_reason: str | None, logprobs: dict[str, Any] | None) -> str:
        content = {"delta": delta} if self.chat else {"text": delta}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        body = {**self._head(self._chunk_object), "choices": [choice]}
        return sse({**body, "usage": None} if self.with_usage else body)

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
