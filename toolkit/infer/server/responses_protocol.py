"""Validation of the body of POST /v1/responses, in its plain form: text, function tools, nothing that is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, ValidationError, model_validator

from toolkit.chat_rows import short
from toolkit.infer.request.chat_prompt import ANY
from toolkit.infer.server.api_errors import from_validation
from toolkit.infer.server.message_protocol import (
    MOST_TOOLS,
    FunctionName,
    JsonObject,
    Strict,
    Text,
    wrong_field,
)
from toolkit.infer.server.openai_protocol import ChatRequest

# Field -> neutral values, see Strict.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "user": (ANY,),
    "safety_identifier": (ANY,),
    "prompt_cache_key": (ANY,),
    "prompt_cache_retention": (ANY,),
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "include": ([],),
    "top_logprobs": (0,),
    "stream_options": ({"include_obfuscation": False}, {}),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": (),
    "moderation": (),
}
ITEM_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "status": (ANY,),
    "annotations": ([],),
    "logprobs": ([],),
    "encrypted_content": (),
    "phase": (),
}
# Field of a chat -> field of a response, where they differ.
NAMES_IN_RESPONSES = {
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
    "response_format.json_schema.name": "text.format.name",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
}


class _Item(Strict):
    neutral = ITEM_NEUTRAL


class InputText(_Item):
    """A part of a message. Other parts (images, files, audio) are refused."""

    type: Literal["input_text", "output_text"]
    text: Text


class InputMessage(_Item):
    """A message of the input."""

    type: Literal["message"] = "message"
    id: Text | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[InputText]

    @property
    def text(self) -> str:
        """The text of the message; several parts are joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class InputCall(_Item):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    id: Text | None = None
    call_id: Text
    name: FunctionName
    arguments: Text


class CallOutput(_Item):
    """What a called function returned."""

    type: Literal["function_call_output"]
    id: Text | None = None
    call_id: Text
    output: Text | list[InputText]

    @property
    def text(self) -> str:
        """The text of the output."""
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


class ReasoningText(Strict):
    """A part of an earlier answer's reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(_Item):
    """Reasoning of an earlier answer. It is passed to the chat template, which decides whether to show it."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: list[JsonValue] = Field(default_factory=list, max_length=0)
    content: list[ReasoningText] = Field(default_factory=list)


def _kind(item: Any) -> str | None:
    """The tag of an input item; the tags are capitalised, so that no field of an error's path is taken for one."""
    kind = (item.get("type") or "message") if isinstance(item, dict) else None
    return {
        "message": "Message",
        "function_call": "Call",
        "function_call_output": "Output",
        "reasoning": "Reasoning",
    }.get(kind if isinstance(kind, str) else "")


InputItem = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[InputCall, Tag("Call")]
    | Annotated[CallOutput, Tag("Output")]
    | Annotated[InputReasoning, Tag("Reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="an item's 'type' must be message, function_call, function_call_output or reasoning",
    ),
]


class ResponsesFunction(Strict):
    """A function that the model may call. parameters: a JSON schema."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponsesChoice(Strict):
    """`tool_choice`: call this function."""

    type: Literal["function"]
    name: FunctionName


class ReasoningSettings(Strict):
    """How much to reason, for templates that read `reasoning_effort`."""

    effort: Text | None = None


class TextFormat(Strict):
    """The form of the answer's text. The other fields belong to the type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        """The same as a chat's `response_format`."""
        if self.type != "json_schema" and self.json_schema is None:
            return {"type": self.type}
        schema = {"name": self.name, "description": self.description, "schema": self.json_schema, "strict": self.strict}
        return {"type": self.type, "json_schema": {name: value for name, value in schema.items() if value is not None}}


class TextSettings(Strict):
    """Settings of the answer's text."""

    format: TextFormat | None = None


class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    neutral = NEUTRAL
    model: str
    input: Text | list[InputItem] = Field(min_length=1)
    instructions: Text | None = None
    text: TextSettings | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    tools: list[ResponsesFunction] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningSettings | None = None
    metadata: dict[Text, Annotated[Text, Field(max_length=512)]] = Field(default_factory=dict, max_length=16)
    speculative: bool = True
    shape: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _functions_only(cls, body: Any) -> Any:
        if isinstance(body, dict) and isinstance(body.get("tools"), list):
            kinds = [tool.get("type") for tool in body["tools"] if isinstance(tool, dict)]
            wrong = next((at for at, kind in enumerate(kinds) if kind != "function"), None)
            if wrong is not None:
                message = f"only tools of the type 'function' are supported, got {short(kinds[wrong])}"
                raise wrong_field(f"tools[{wrong}].type", message)
        return body

    def as_chat(self) -> dict[str, Any]:
        """The body of a chat request with the same meaning."""
        chat: dict[str, Any] = {"model": self.model, "messages": self._messages(), "stream": self.stream}
        chat |= {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_output_tokens}
        chat |= {"response_format": self.text.format.response_format if self.text and self.text.format else None}
        chat |= {"speculative": self.speculative, "shape": self.shape}
        chat |= {"reasoning_effort": self.reasoning.effort if self.reasoning else None}
        names = ("name", "description", "parameters", "strict")
        functions = [{name: getattr(tool, name) for name in names} for tool in self.tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
        chat["tool_choice"], chat["parallel_tool_calls"] = self.tool_choice, self.parallel_tool_calls
        if isinstance(self.tool_choice, ResponsesChoice):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        return chat

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return [*messages, *_chat_messages(self.input)]


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The chat request with the same meaning. Raises ApiError for what only a chat checks."""
    try:
        return ChatRequest.model_validate(body.as_chat())
    except ValidationError as error:  # e.g. a choice that is none of the tools
        raise from_validation(error.errors()) from error


def _chat_messages(items: Sequence[InputMessage | InputCall | CallOutput | InputReasoning]) -> list[dict[str, Any]]:
    """The items as chat messages. An answer's reasoning, text and calls are one message."""
    messages: list[dict[str, Any]] = []

    def answer() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in items:
        if isinstance(item, InputReasoning):
            text = "".join(part.text for part in item.content)
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif isinstance(item, InputCall):
            function = {"name": item.name, "arguments": item.arguments}
            answer().setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, CallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
        elif item.role == "assistant" and messages and "reasoning_content" in messages[-1] and not _said(messages[-1]):
            messages[-1]["content"] = item.text
        else:
            messages.append({"role": item.role, "content": item.text})
    return messages


def _said(message: dict[str, Any]) -> bool:
    return bool(message["content"] or message.get("tool_calls"))
