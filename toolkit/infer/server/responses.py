"""Replies of /v1/responses: items (reasoning, a message, function calls), whole and as typed events.

response.created, response.in_progress
  response.output_item.added            for each item
    response.content_part.added           text and reasoning only
    response.output_text.delta .. done    or response.reasoning_text.*, response.function_call_arguments.*
    response.content_part.done
  response.output_item.done
response.completed | response.incomplete | response.failed  with the whole response
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from toolkit.infer.server.answer_pieces import Piece
from toolkit.infer.server.request_params import DefaultSampling
from toolkit.infer.server.responses_protocol import ResponsesRequest, TextFormat

DELTA = {"content": "output_text", "reasoning": "reasoning_text", "arguments": "function_call_arguments"}
STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}  # by finish reason; "abort": failed
# OpenAI has no code of its own for an answer that was cut: `incomplete_details` knows max_output_tokens only.
CUT = {"code": "server_error", "message": "the answer was cut: its time was up, or the server shut down"}


class ResponseForm:
    """One response while it is written; a `Form` of the one answer of a request."""

    def __init__(self, body: ResponsesRequest, defaults: DefaultSampling) -> None:
        text_format = (body.text and body.text.format) or TextFormat.model_validate({"type": "text"})
        self.id = f"resp_{uuid.uuid4().hex}"
        self._items: list[dict[str, Any]] = []
        self._kind = ""  # of the open item
        self._text = ""  # of the open item
        self._sequence = 0
        self._status = "in_progress"
        self._echo = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "text": {"format": text_format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of the response. choices: not needed, `choice` has kept them."""
        return {
            **self._echo,
            "status": self._status,
            "error": CUT if self._status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": self._items,
            "usage": usage_of(usage) if usage else None,
        }

    def choice(
        self, index: int, pieces: Sequence[Piece], finish_reason: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Take the whole answer."""
        for piece in pieces:
            self.piece(index, piece, logprobs)
        self.ended(index, finish_reason, logprobs, {})
        return {}

    def first(self, index: int) -> list[str]:
        """Events that begin a stream."""
        return [self._event(f"response.{name}", response=self.whole((), {})) for name in ("created", "in_progress")]

    def piece(self, index: int, piece: Piece, logprobs: dict[str, Any] | None) -> str:
        """Events with a new piece."""
        events = []
        if piece.kind == "call" or (piece.kind != "arguments" and piece.kind != self._kind):
            events = [*self._close(), *self._open(piece)]
        if piece.kind != "call" and piece.text:
            self._text += piece.text
            place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
            place |= {} if piece.kind == "arguments" else {"content_index": 0}
            place |= {"logprobs": []} if piece.kind == "content" else {}
            events.append(self._event(f"response.{DELTA[piece.kind]}.delta", **place, delta=piece.text))
        return "".join(events)

    def ended(
        self, index: int, finish_reason: str, logprobs: dict[str, Any] | None, extra: dict[str, Any]
    ) -> list[str]:
        """Events that end the last item. extra: empty, as no field of a request asks for any."""
        self._status = STATUSES.get(finish_reason, "failed")
        return self._close("completed" if self._status == "completed" else "incomplete")

    def last(self, usage: dict[str, Any]) -> list[str]:
        """The event that ends a stream."""
        return [self._event(f"response.{self._status}", response=self.whole((), usage))]

    def failed(self, body: dict[str, Any]) -> str:
        """The last event of a stream whose answer failed; body: as of a reply with an error's status."""
        error = body["error"]
        return self._event("error", **{name: error[name] for name in ("code", "message", "param")})

    def _open(self, piece: Piece) -> list[str]:
        """Begin an item."""
        self._text, self._kind = "", piece.kind
        name = uuid.uuid4().hex
        item: dict[str, Any]
        if piece.kind == "call":
            self._kind = "arguments"
            item = {"id": f"fc_{name}", "type": "function_call", "call_id": piece.id, "name": piece.text}
            item |= {"arguments": ""}
        elif piece.kind == "reasoning":
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": []}
        self._items.append({**item, "status": "in_progress"})
        place = {"output_index": len(self._items) - 1}
        events = [self._event("response.output_item.added", **place, item=self._items[-1])]
        if self._kind != "arguments":
            place = {"item_id": self._items[-1]["id"], **place, "content_index": 0}
            events.append(self._event("response.content_part.added", **place, part=self._part()))
        return events

    def _close(self, status: str = "completed") -> list[str]:
        """End the open item, if there is one."""
        if not self._kind:
            return []
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        done = f"response.{DELTA[self._kind]}.done"
        if self._kind == "arguments":
            item["arguments"] = self._text
            events = [self._event(done, **place, name=item["name"], arguments=self._text)]
        else:
            item["content"] = [self._part()]
            place["content_index"] = 0
            extra: dict[str, Any] = {"logprobs": []} if self._kind == "content" else {}
            events = [
                self._event(done, **place, **extra, text=self._text),
                self._event("response.content_part.done", **place, part=self._part()),
            ]
        item["status"] = status
        self._kind = ""
        return [*events, self._event("response.output_item.done", output_index=place["output_index"], item=item)]

    def _part(self) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> str:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """The `usage` of a chat in the form of responses."""
    details = usage["completion_tokens_details"]
    renamed = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": usage["total_tokens"],
    }
    return renamed | ({"speculative": usage["speculative"]} if "speculative" in usage else {})
