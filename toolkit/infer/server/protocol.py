"""What a request may hold: the bodies of chats, completions and tokenisation, in OpenAI's form.

No field is silently ignored: a request is refused if it sets a field that the engine does not apply, unless the field
has its neutral value (suffix="", tools=[], ...).
Extensions, with the names of SGLang and vLLM: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids,
ignore_eos, return_token_ids, chat_template_kwargs, priority (vLLM's order). Of SGLang: json_schema, regex. Our own:
`speculative` (false: plain decoding), `shape` (the request's draft shape as text, "S,K,N" or "N"), `verify` (the rule
that accepts its drafts), `timeout` (seconds) and `return_acceptance` (statistics of drafts and times with each answer).
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from toolkit.infer.request.chat_messages import ANY, ChatMessage, FunctionName, Strict, Text, encodable, wrong_field
from toolkit.infer.request.params import MOST_LOGPROBS
from toolkit.infer.server.api_errors import from_validation

MAX_TOOLS = 128
MAX_STOPS = 4
MAX_FORCED_CALLS = 8  # a small model may write calls without end


def _encodable_json(value: dict[str, Any]) -> dict[str, Any]:
    encodable(json.dumps(value, ensure_ascii=False))
    return value


def _token_id(text: str) -> str:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise PydanticCustomError("token_id", "a token id of at most 9 digits is needed")
    return text


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_encodable_json)]
TokenId = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]


# -- tools and forms of an answer --------------------------------------------------------------------------------------


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
        described = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": described | {"parameters": self.schema_of_arguments}}

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


def forced_schema(request: ChatRequest) -> dict[str, Any]:
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
    return schema | {"maxItems": 1 if request.one_call else MAX_FORCED_CALLS}


def _moved(schema: Any, place: str) -> Any:
    """A schema with its references to its own root (#, #/$defs/..) changed to `place`."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        moved["$ref"] = place + schema["$ref"][1:]
    return moved


class NamedSchema(Strict):
    """A schema with the name that a client gives it. It is enforced with each value of `strict`."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """An answer in JSON, any object or one of a schema. json_schema: with the type of this name only."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            needed = "needs" if self.type == "json_schema" else "has no"
            raise wrong_field("json_schema", f"'response_format' of type {self.type} {needed} 'json_schema'")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must match; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return {"type": "object"} if self.type == "json_object" else None


# -- chats and completions ---------------------------------------------------------------------------------------------

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
# Field -> neutral values, see Strict; of both endpoints, of chats, of completions.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(LABELS, (ANY,)),
    "prediction": (ANY,),  # of the answer: it may make it faster, never another one
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (True, False),
    "skip_special_tokens": (True,),
    "verbosity": ("medium",),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {**NEUTRAL, "best_of": (1,), "echo": (False,)}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
}


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationFields(Strict):
    """The common fields of both endpoints. None: not given."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[int] = Field(default_factory=list)
    stop: Text | list[Text] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_acceptance: bool = False
    json_schema: Text | dict[str, Any] | None = None
    regex: Text | None = None
    speculative: bool = True
    shape: str | None = None
    verify: Literal["auto", "target", "rejection", "block"] | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="lower runs first, as in vLLM")
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False, description="seconds until the answer is cut")

    @model_validator(mode="after")
    def _check_fields(self) -> GenerationFields:
        if len(self.stops) > MAX_STOPS or "" in self.stops:
            problem = "is empty; leave it out" if "" in self.stops else f"has more than {MAX_STOPS} strings"
            raise wrong_field("stop", f"'stop' {problem}")
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "'stream_options' needs stream=true")
        if self.return_token_ids and self.stream:
            raise wrong_field("return_token_ids", "'return_token_ids' needs stream=false")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        """The largest number of answer tokens; None: until the context is full."""
        return self.max_tokens

    @property
    def schema_of_answer(self) -> Any:
        """The JSON schema that the answer must match; None: no schema."""
        return self.json_schema

    @property
    def has_grammar(self) -> bool:
        """Whether the whole answer has a form that the request determines."""
        return self.schema_of_answer is not None or self.regex is not None

    @property
    def answers(self) -> int:
        """How many answers each prompt gets in the engine; the reply has `n` of them."""
        return self.n

    @property
    def n_logprobs(self) -> int | None:
        """Number of top log-probabilities per token, in addition to the token's own; None: no log-probabilities."""
        return None


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions. chat_template_kwargs: variables that the target's chat template reads."""

    neutral = CHAT_NEUTRAL
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    reasoning_effort: Text | None = None
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True

    @classmethod
    def checked(cls, body: dict[str, Any]) -> ChatRequest:
        """The request of a body that was made from another form of a chat. Raises ApiError."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise from_validation(error.errors()) from error

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise wrong_field("tools", "two tools have one name")
        if isinstance(self.tool_choice, NamedChoice) and self.tool_choice.function.name not in names:
            raise wrong_field("tool_choice", f"'{self.tool_choice.function.name}' is none of the tools")
        if self.tool_choice == "required" and not names:
            raise wrong_field("tool_choice", "'tool_choice' is 'required', which needs tools")
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

    @model_validator(mode="after")
    def _one_grammar(self) -> ChatRequest:
        ways = {"tool_choice": self.forced, "response_format": self._schema_of_format is not None}
        own = "regex" if self.json_schema is None else "json_schema"  # both: SamplingParams refuses it
        ways[own] = self.json_schema is not None or self.regex is not None
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise wrong_field(given[1], f"'{given[0]}' and '{given[1]}' both determine the answer; give one of them")
        if given and self.offered and not self.forced:
            message = f"'{given[0]}' determines the whole answer, so none of the 'tools' could be called"
            raise wrong_field(given[0], f"{message}; leave one of them out, or set tool_choice to 'none'")
        return self

    @model_validator(mode="after")
    def _check_numbers(self) -> ChatRequest:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            message = "'max_tokens' and 'max_completion_tokens' differ; give one of them"
            raise wrong_field("max_completion_tokens", message)
        if self.top_logprobs and not self.logprobs:
            raise wrong_field("top_logprobs", "'top_logprobs' needs logprobs=true")
        return self

    @property
    def _schema_of_format(self) -> Any:
        return None if self.response_format is None else self.response_format.schema_of_answer

    @property
    def schema_of_answer(self) -> Any:
        if self.forced:
            return forced_schema(self)
        return self.json_schema if self._schema_of_format is None else self._schema_of_format

    @property
    def n_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions: one prompt or several, each as text or as token ids.

    echo: the text begins with the prompt, and log-probabilities are those of its tokens too; max_tokens may be 0 then.
    best_of: answers that are written, of which those `n` of the largest mean log-probability are returned.
    """

    neutral = COMPLETION_NEUTRAL
    prompt: Text | list[Text] | list[int] | list[list[int]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=128)

    @model_validator(mode="after")
    def _check_answers(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.n:
            raise wrong_field("best_of", f"'best_of' is {self.best_of}, less than 'n'")
        if self.max_tokens == 0 and not self.echo:
            raise wrong_field("max_tokens", "'max_tokens' is 0: only 'echo' returns anything then")
        if self.stream and (self.echo or self.answers > self.n):
            raise wrong_field("echo" if self.echo else "best_of", "'echo' and 'best_of' need stream=false")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as ids."""
        several = not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)
        return [*self.prompt] if several else [self.prompt]  # type: ignore[list-item]

    @property
    def answers(self) -> int:
        return self.best_of or self.n

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for this endpoint


# -- tokenisation ------------------------------------------------------------------------------------------------------


class TokenizeRequest(Strict):
    """Body of POST /tokenize: a text, or a chat by the target's chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    add_special_tokens: bool | None = Field(None, description="of a text; default: true")
    add_generation_prompt: bool | None = Field(None, description="of a chat; default: true")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong_field("prompt", "give one of 'prompt' and 'messages'")
        of_chats = ("tools", "chat_template_kwargs", "add_generation_prompt")
        of_texts = ("add_special_tokens",)  # in a chat the template writes them
        for name in of_chats if self.messages is None else of_texts:
            if getattr(self, name) not in (None, [], {}):
                raise wrong_field(name, f"'{name}' needs {'messages' if self.messages is None else 'a prompt'}")
        return self


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]
