"""Validation of OpenAI's request bodies.

No field is silently ignored: a request is refused if it sets a field that the engine does not apply, unless the field
has its neutral value (best_of=1, tools=[], ...).
Extensions, with the names of SGLang and vLLM: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids,
ignore_eos, return_token_ids. Our own: `speculative` (false: plain decoding) and `shape` (the request's draft shape as
text, "S,K,N").
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from toolkit.infer.request.chat_prompt import (
    ANY,
    MESSAGE_NEUTRAL,
    UnsupportedFieldError,
    template_message,
    without_neutral,
)
from toolkit.infer.request.params import MOST_LOGPROBS

# Field -> neutral values, which change nothing. null is neutral for every field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "user": (ANY,),
    "metadata": (ANY,),
    "safety_identifier": (ANY,),
    "prompt_cache_key": (ANY,),
    "prompt_cache_retention": (ANY,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "skip_special_tokens": (True,),
    "refusal": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {**NEUTRAL, "logprobs": (), "top_logprobs": (0,)}


def _drop_neutral(body: Any, neutral: dict[str, tuple[Any, ...]]) -> Any:
    """The body without nulls and neutral fields. Raises PydanticCustomError for a known field with another value."""
    if not isinstance(body, dict):
        return body
    try:
        return without_neutral(body, neutral)
    except UnsupportedFieldError as error:
        context = {"message": str(error), "param": error.field}
        raise PydanticCustomError("unsupported_parameter", "{message}", context) from error


def _encodable(text: str) -> str:
    """Refuse a lone surrogate ("\\ud800"): JSON allows it, tokenizers do not."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("unicode", "the text is not valid unicode (a lone surrogate)") from error
    return text


def _token_id(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        raise PydanticCustomError("token_id", "a key must be a token id, written in digits")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Strict):
    """One text part of a message. Other parts (images, audio) are refused."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Strict):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, body: Any) -> Any:
        return _drop_neutral(body, MESSAGE_NEUTRAL)

    @property
    def text(self) -> str:
        """The text of the message; several parts are joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """The message in the form of chat templates."""
        return template_message(self.role, self.text)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationFields(_Strict):
    """The common fields of both endpoints. None: not given."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: off")
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
    speculative: bool = True
    shape: str | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    @model_validator(mode="before")
    @classmethod
    def _neutral(cls, body: Any) -> Any:
        return _drop_neutral(body, cls.neutral)

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > 4:
            raise PydanticCustomError("too_many", "at most 4 stop strings are allowed")
        if "" in stops:
            raise PydanticCustomError("empty", "a stop string is empty; leave it out")
        return stops

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "'stream_options' needs stream=true", {"param": "stream_options"}
            )
        return self

    @model_validator(mode="after")
    def _check_token_ids(self) -> GenerationFields:
        if self.return_token_ids and self.stream:
            raise PydanticCustomError(
                "return_token_ids", "'return_token_ids' needs stream=false", {"param": "return_token_ids"}
            )
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_stream_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """The largest number of answer tokens; None: until the context is full."""
        return self.max_tokens

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(token): bias for token, bias in self.logit_bias.items()}

    @property
    def most_logprobs(self) -> int | None:
        """Number of top log-probabilities per token, in addition to the token's own; None: no log-probabilities."""
        return None


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = "'max_tokens' and 'max_completion_tokens' differ; give one of them"
            raise PydanticCustomError("two_limits", "{message}", {"message": message, "param": "max_completion_tokens"})
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            message = "'top_logprobs' needs logprobs=true"
            raise PydanticCustomError("top_logprobs", "{message}", {"message": message, "param": "top_logprobs"})
        return self

    @property
    def most_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions: one prompt, as text or as token ids."""

    neutral = COMPLETION_NEUTRAL
    prompt: Text | list[int] = Field(min_length=1)

    @property
    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for this endpoint
