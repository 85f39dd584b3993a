"""Validation of chat messages and tools, OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from toolkit.infer.request.chat_prompt import ANY, UnsupportedFieldError, template_message, without_neutral

MOST_TOOLS = 128
MOST_FORCED_CALLS = 8  # a small model may write calls without end


def drop_neutral(body: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    """The body without nulls and neutral fields. Raises PydanticCustomError for a known field with another value."""
    if not isinstance(body, dict):
        return body
    try:
        return without_neutral(body, neutral)
    except UnsupportedFieldError as error:
        context = {"message": str(error), "param": error.field}
        raise PydanticCustomError("unsupported_parameter", "{message}", context) from error


def encodable(text: str) -> str:
    """Refuse a lone surrogate ("\\ud800"): JSON allows it, tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "the text is not valid unicode (a lone surrogate)") from error
    return text


def _encodable_json(value: dict[str, Any]) -> dict[str, Any]:
    encodable(json.dumps(value, ensure_ascii=False))
    return value


def wrong_field(field: str, message: str) -> PydanticCustomError:
    """The error of a validator that looks at several fields. field: the one at fault, within the validated object."""
    return PydanticCustomError("field", "{message}", {"message": message, "param": field})


Text = Annotated[str, AfterValidator(encodable)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_encodable_json)]


class Strict(BaseModel):
    """A JSON object whose fields are all known and of exactly the stated types.

    neutral: further fields -> their neutral values, which change nothing. null is neutral for every field.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        return drop_neutral(body, cls.neutral)


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
    def values(self) -> dict[str, Any] | str:
        """The arguments as chat templates read them: an object, or their text if they are none: an answer may be cut
        within them, and its client sends them back as they are."""
        try:
            read = json.loads(self.arguments or "{}")
            encodable(json.dumps(read, ensure_ascii=False))
        except (ValueError, RecursionError, PydanticCustomError):
            return self.arguments
        return read if isinstance(read, dict) else self.arguments


class ToolCall(Strict):
    """A call in an assistant's message."""

    neutral = {"index": (ANY,)}  # of a streamed call, which clients keep
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call in the form of chat templates."""
        function = {"name": self.function.name, "arguments": self.function.values}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(Strict):
    """One chat message. tool_calls, reasoning_content: an assistant's; tool_call_id, name: of a tool's result."""

    neutral = {"refusal": (), "audio": (), "annotations": ([],), "function_call": ()}
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

    @property
    def text(self) -> str:
        """The text of the message; several parts are joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        message: dict[str, Any] = {**template_message(self.role, self.text)}
        if self.tool_calls:
            message["content"] = self.text or None  # `chat_text` leaves out what is null
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        extra = {"reasoning_content": self.reasoning_content, "tool_call_id": self.tool_call_id, "name": self.name}
        return message | {name: value for name, value in extra.items() if value is not None}


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages in the form of chat templates. A tool's result without a name gets that of its call."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls}
    converted = []
    for message in messages:
        one = message.for_template()
        if message.role == "tool" and message.tool_call_id in names:
            one.setdefault("name", names[message.tool_call_id])
        converted.append(one)
    return converted


def wrap_arguments(messages: Sequence[dict[str, Any]]) -> bool:
    """Put arguments that are no object into one, for a template that takes nothing else. Returns whether there are any.

    Changes `messages`.
    """
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    texts = [one for one in functions if isinstance(one["arguments"], str)]
    for one in texts:
        one["arguments"] = {"arguments": one["arguments"]}
    return bool(texts)


class Function(Strict):
    """A function that the model may call. parameters: a JSON schema.

    strict: accepted, as clients' helpers set it always. It changes nothing: a forced call matches its schema with and
    without it; what a model calls by its own choice is passed on unchecked.
    """

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> Function:
        if (self.parameters or {}).get("type", "object") != "object":
            raise wrong_field("parameters.type", 'arguments are an object: \'parameters\' needs "type": "object"')
        return self


class Tool(Strict):
    """A tool; functions only."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool in the form of chat templates, which read all three fields."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.schema_of_arguments,
        }
        return {"type": "function", "function": function}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of the arguments, always an object; without one, that of an object without properties."""
        return {**(self.function.parameters or {"type": "object", "properties": {}}), "type": "object"}


class ChosenFunction(Strict):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Strict):
    """`tool_choice`: call this function."""

    type: Literal["function"]
    function: ChosenFunction


class ToolFields(Strict):
    """The fields of a request about tools."""

    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise wrong_field("tools", "two tools have one name")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            raise wrong_field("tool_choice", f"'{self.tool_choice.function.name}' is none of the tools")
        if self.tool_choice == "required" and not names:
            raise wrong_field("tool_choice", "'required' needs tools")
        return self

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call in this request."""
        if isinstance(self.tool_choice, NamedChoice):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def one_call(self) -> bool:
        """Whether the answer may have one call only."""
        return not self.parallel_tool_calls or isinstance(self.tool_choice, NamedChoice)


def forced_schema(request: ToolFields) -> dict[str, Any]:
    """The JSON schema of an answer that must be a call: a list of {"name", "arguments"} objects, at least one.

    Each function's schema is put under $defs, and its own references are made relative to that place.
    """
    calls, defs = [], {}
    for number, tool in enumerate(request.offered):
        place = f"tool{number}"
        defs[place] = _moved(tool.schema_of_arguments, f"#/$defs/{place}")
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{place}"}}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": defs}
    return schema | {"maxItems": 1 if request.one_call else MOST_FORCED_CALLS}


def _moved(schema: Any, place: str) -> Any:
    """A schema with its references to its own root (#, #/$defs/..) changed to `place`."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        moved["$ref"] = place + schema["$ref"][1:]
    return moved
