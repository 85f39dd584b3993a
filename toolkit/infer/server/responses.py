"""POST /v1/responses as a chat: the request becomes a chat request, the pieces of its answer become items and events.

Nothing is stored. A field that is not translated is a 400 that names it; reasoning is counted in `usage` only.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from toolkit.chat_rows import short
from toolkit.infer.request.chat_messages import ANY, Strict, Text
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.protocol import LABELS, ChatRequest, JsonObject
from toolkit.infer.server.tool_calls import Piece

# Field -> neutral values, see Strict.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(LABELS, (ANY,)),
    **dict.fromkeys(("store", "background"), (False,)),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "include": ([],),
    "stream_options": ({"include_obfuscation": False}, {}),
}
# Name of a chat's field (pattern) -> name of a response's field.
RENAMED = (
    (r"^messages\b.*", "input"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_tokens", "max_output_tokens"),
    (r"^(tools\[\d+\]|tool_choice)\.function", r"\1"),
)


class TextSettings(Strict):
    """Settings of the answer's text. format: as `response_format` of a chat, without its inner object."""

    format: JsonObject | None = None


class ResponsesRequest(Strict):
    """Body of POST /v1/responses. What a chat has too is checked when it has become one."""

    neutral = NEUTRAL
    model: str
    input: Text | list[JsonObject] = Field(min_length=1)
    instructions: Text | None = None
    text: TextSettings | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    tools: list[JsonObject] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | JsonObject = "auto"
    parallel_tool_calls: bool = True
    speculative: bool = True
    shape: str | None = None


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The chat request with the same meaning. Raises ApiError in the names of chats, see `in_responses`."""
    same = ("model", "stream", "temperature", "top_p", "speculative", "shape", "parallel_tool_calls")
    chat = {name: getattr(body, name) for name in same} | {"max_tokens": body.max_output_tokens}
    chat["messages"] = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    for item in body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input}]:
        _add_item(chat["messages"], item)
    chat["tools"] = [_nested(tool, "function") for tool in body.tools]
    choice = body.tool_choice
    chat["tool_choice"] = choice if isinstance(choice, str) else _nested(choice, "function")
    if body.text and body.text.format:
        chat["response_format"] = _nested(body.text.format, "json_schema")
    return ChatRequest.checked(chat)


def in_responses(param: str | None) -> str | None:
    """The name of a chat's field in a response."""
    for pattern, name in RENAMED:
        param = param and re.sub(pattern, name, param)
    return param


def _nested(value: dict[str, Any], name: str) -> dict[str, Any]:
    """{"type", ..} of a response in the form of chats: {"type", name: {..}}."""
    inner = {key: one for key, one in value.items() if key != "type" and one is not None}
    return {"type": value.get("type")} | ({name: inner} if inner else {})


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item of the input to a chat. A call joins the answer before it."""
    kind = item.get("type") or "message"
    rest = {name: value for name, value in item.items() if name not in ("type", "id", "status")}
    if kind == "function_call":
        if not messages or messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append({"id": rest.pop("call_id", None), "function": rest})
    elif kind == "function_call_output":
        names = {"call_id": "tool_call_id", "output": "content"}
        messages.append({"role": "tool", **{names.get(name, name): value for name, value in rest.items()}})
    elif kind == "message":
        messages.append(rest)
    else:
        message = f"an item's 'type' must be message, function_call or function_call_output, got {short(kind)}"
        raise ApiError(400, message, param="input", code="invalid_value")


USAGE = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
USAGE |= {f"{name}_details": f"{new}_details" for name, new in USAGE.items()}
STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}  # by finish reason; "abort": failed
# OpenAI has no code for an answer that its time or a shutdown has cut.
CUT = {"code": "server_error", "message": "the answer was cut: its time was up, or the server shut down"}
ENDS = {"incomplete": {"incomplete_details": {"reason": "max_output_tokens"}}, "failed": {"error": CUT}}


class ResponseForm:
    """One response while it is written; as `ReplyForm`, for the one answer of a request."""

    def __init__(self, body: ResponsesRequest) -> None:
        names = "model instructions max_output_tokens temperature top_p tools tool_choice parallel_tool_calls"
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._head |= body.model_dump(include=set(names.split())) | {"store": False, "incomplete_details": None}
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the part of the message that is written
        self._status, self._sequence = "in_progress", 0

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of the response. choices: not needed, `choice` has kept them."""
        state: dict[str, Any] = {"status": self._status, "output": self._items, "error": None}
        state["usage"] = {USAGE.get(name, name): value for name, value in usage.items()} or None
        return self._head | state | ENDS.get(self._status, {})

    def choice(self, index: int, pieces: Sequence[Piece], finish_reason: str, logprobs: Any = None) -> dict[str, Any]:
        """Take the whole answer."""
        for piece in pieces:
            self.piece(index, piece)
        self.ended(index, finish_reason)
        return {}

    def first(self, index: int) -> list[str]:
        """Events that begin a stream."""
        return [self._event(name, response=self.whole((), {})) for name in ("created", "in_progress")]

    def piece(self, index: int, piece: Piece, logprobs: Any = None) -> str:
        """Events with a new piece."""
        if piece.kind == "reasoning":
            return ""
        if piece.kind == "call":
            call = {"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": ""}
            events = self._close() + self._begin("fc", call)
            events += self._event("function_call_arguments.delta", delta=piece.text)
            self._items[-1] |= {"arguments": piece.text, "status": "completed"}
            events += self._event("function_call_arguments.done", arguments=piece.text)
            return events + self._event("output_item.done", item=self._items[-1])
        events = "" if self._open else self._begin("msg", {"type": "message", "role": "assistant", "content": []})
        if self._open is None:
            self._open = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"] = [self._open]
            events += self._event("content_part.added", part=self._open)
        self._open["text"] += piece.text
        return events + self._event("output_text.delta", delta=piece.text, logprobs=[])

    def ended(self, index: int, finish_reason: str, logprobs: Any = None, extra: Any = None) -> list[str]:
        """Events that end the last item."""
        self._status = STATUSES.get(finish_reason, "failed")
        return [self._close("completed" if self._status == "completed" else "incomplete")]

    def last(self, usage: dict[str, Any]) -> list[str]:
        """The event that ends a stream."""
        return [self._event(self._status, response=self.whole((), usage))]

    def failed(self, body: dict[str, Any]) -> str:
        """The last event of a stream whose answer failed; body: as of a reply with an error's status."""
        return self._event("error", **{name: body["error"][name] for name in ("code", "message", "param")})

    def _begin(self, prefix: str, item: dict[str, Any]) -> str:
        self._items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        return self._event("output_item.added", item=self._items[-1])

    def _close(self, status: str = "completed") -> str:
        """Events that end an open message."""
        if self._open is None:
            return ""
        events = self._event("output_text.done", text=self._open["text"], logprobs=[])
        events += self._event("content_part.done", part=self._open)
        self._open, self._items[-1]["status"] = None, status
        return events + self._event("output_item.done", item=self._items[-1])

    def _event(self, kind: str, **fields: Any) -> str:
        """An event; beside what it says of the response or the latest item, its place."""
        place: dict[str, Any] = {"type": kind if kind == "error" else f"response.{kind}"}
        place["sequence_number"], self._sequence = self._sequence, self._sequence + 1
        if self._items and "response" not in fields:
            place |= {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return f"event: {place['type']}\ndata: {json.dumps(place | fields, ensure_ascii=False, allow_nan=False)}\n\n"
