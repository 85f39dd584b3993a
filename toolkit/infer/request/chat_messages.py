"""Chat messages in OpenAI's form, read strictly: nothing that a message says is ignored.

A message becomes the {"role", "content", ..} that chat templates read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from toolkit.chat_rows import short

ANY = object()  # every value is neutral: the field is only a label of the request


def encodable(text: str) -> str:
    """Refuse a lone surrogate ("\\ud800"): JSON allows it, tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "the text is not valid unicode (a lone surrogate)") from error
    return text


def wrong_field(field: str, message: str) -> PydanticCustomError:
    """The error of a validator that looks at several fields. field: the one at fault, within the validated object."""
    return PydanticCustomError("field", "{message}", {"message": message, "param": field})


Text = Annotated[str, AfterValidator(encodable)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Strict(BaseModel):
    """A JSON object whose fields are all known and of exactly the stated types.

    neutral: further fields -> their neutral values, which change nothing. null is neutral for every field.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if value is None:
                continue
            if name not in cls.neutral:
                kept[name] = value
            elif not any(_same(value, one) for one in cls.neutral[name]):
                allowed = " or ".join(map(repr, cls.neutral[name])) or "null"
                message = f"'{name}' is not supported: got {short(value)}, only {allowed} is accepted; leave it out"
                raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message, "param": name})
        return kept


def _same(value: Any, neutral: Any) -> bool:
    """True if the values are equal, an object's nulls left out, and both or neither are bools: 0 is not False here."""
    if isinstance(value, Mapping):
        value = {name: one for name, one in value.items() if one is not None}
    return neutral is ANY or (value == neutral and isinstance(value, bool) == isinstance(neutral, bool))


class TextPart(Strict):
    """One text part of a message. Other parts (images, audio) are refused."""

    neutral = {"annotations": ([],), "logprobs": ([],)}  # of an answer's part, which clients send back
    type: Literal["text", "input_text", "output_text"]  # the last two: in responses
    text: Text


class CalledFunction(Strict):
    """What an assistant has called. arguments: JSON text of an object, or what a model wrote in its place."""

    name: FunctionName
    arguments: Text

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as chat templates read them: an object. Text that is none is put into one: an answer may be
        cut within its arguments, and its client sends them back as they are."""
        try:
            values = json.loads(self.arguments or "{}")
            encodable(json.dumps(values, ensure_ascii=False))
        except (ValueError, RecursionError, PydanticCustomError):
            values = None
        return values if isinstance(values, dict) else {"arguments": self.arguments}


class ToolCall(Strict):
    """A call in an assistant's message."""

    neutral = {"index": (ANY,)}  # of a streamed call, which clients keep
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    """One chat message. tool_calls, reasoning_content: an assistant's; tool_call_id, name: of a tool's result."""

    neutral = {"annotations": ([],)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    reasoning_content: Text | None = None
    tool_call_id: Text | None = None
    name: Text | None = None

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise wrong_field("content", "the field 'content' is missing")
        allowed = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id", "name")}
        for field in ("tool_calls", "reasoning_content", "tool_call_id", "name"):
            if getattr(self, field) and field not in allowed.get(self.role, ()):
                raise wrong_field(field, f"'{field}' is not supported in a message of the role '{self.role}'")
        if self.role == "tool" and self.tool_call_id is None:
            raise wrong_field("tool_call_id", "the field 'tool_call_id' is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message in the form of chat templates. Several parts of text are joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            message["content"] = text or None  # `chat_text` leaves out what is null
            message["tool_calls"] = [
                {
                    "id": one.id,
                    "type": "function",
                    "function": {"name": one.function.name, "arguments": one.function.values},
                }
                for one in self.tool_calls
            ]
        extra = {"reasoning_content": self.reasoning_content, "tool_call_id": self.tool_call_id, "name": self.name}
        return message | {name: value for name, value in extra.items() if value is not None}


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages in the form of chat templates. A tool's result without a name gets that of its call."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls}
    converted = [message.for_template() for message in messages]
    for message in converted:
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return converted
