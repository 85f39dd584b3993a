"""Validation of OpenAI's request bodies.

No field is silently ignored: a request is refused if it sets a field that the engine does not apply, unless the field
has its neutral value (suffix="", tools=[], ...).
Extensions, with the names of SGLang and vLLM: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids,
ignore_eos, return_token_ids, chat_template_kwargs, priority (vLLM's order). Of SGLang: json_schema, regex. Our own:
`speculative` (false: plain decoding), `shape` (the request's draft shape as text, "S,K,N"), `verify` (the rule that
accepts its drafts), `timeout` (seconds) and `return_acceptance` (statistics of drafts and times with each answer).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from toolkit.infer.request.chat_prompt import ANY
from toolkit.infer.request.params import MOST_LOGPROBS
from toolkit.infer.server.api_errors import from_validation
from toolkit.infer.server.message_protocol import (
    ChatMessage,
    JsonObject,
    Strict,
    Text,
    ToolFields,
    forced_schema,
    wrong_field,
)
from toolkit.infer.server.response_format import ResponseFormat

# Field -> neutral values, see Strict.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "user": (ANY,),
    "metadata": (ANY,),
    "safety_identifier": (ANY,),
    "prompt_cache_key": (ANY,),
    "prompt_cache_retention": (ANY,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (True, False),
    "skip_special_tokens": (True,),
    "refusal": (),
    "audio": (),
    "prediction": (ANY,),  # of the answer: it may make it faster, never another one
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    # The server chooses draft head and weights; a request cannot bring its own.
    "draft": (),
    "speculative_config": (),
    "lora": (),
    "lora_path": (),
    "lora_request": (),
}
HONOURED_IN_CHATS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")
CHAT_NEUTRAL = {name: values for name, values in NEUTRAL.items() if name not in HONOURED_IN_CHATS}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in NEUTRAL.items() if name not in ("best_of", "echo")},
    "top_logprobs": (0,), "response_format": ({"type": "text"},)
}  # fmt: skip


def _token_id(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise PydanticCustomError("token_id", "a key must be a token id, written in digits")
    return text


TokenId = Annotated[str, AfterValidator(_token_id)]
Bias = Annotated[float, Field(ge=-100, le=100)]


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
    def schema_of_answer(self) -> Any:
        """The JSON schema that the answer must match; None: no schema."""
        return self.json_schema

    @property
    def answers(self) -> int:
        """How many answers each prompt gets in the engine; the reply has `n` of them."""
        return self.n

    @property
    def n_prompts(self) -> int:
        """How many prompts it has."""
        return 1

    @property
    def prompt_logprobs(self) -> int | None:
        """As `most_logprobs`, of the prompt."""
        return None

    @property
    def has_grammar(self) -> bool:
        """Whether the whole answer has a form that the request determines."""
        return self.schema_of_answer is not None or self.regex is not None

    @property
    def most_logprobs(self) -> int | None:
        """Number of top log-probabilities per token, in addition to the token's own; None: no log-probabilities."""
        return None


class ChatRequest(GenerationFields, ToolFields):
    """Body of POST /v1/chat/completions. chat_template_kwargs: variables that the target's chat template reads."""

    neutral = CHAT_NEUTRAL
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    reasoning_effort: Text | None = None
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    response_format: ResponseFormat | None = None

    @classmethod
    def checked(cls, body: dict[str, Any]) -> ChatRequest:
        """The request of a body that was made from another form of a chat. Raises ApiError."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            raise from_validation(error.errors()) from error

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

    @property
    def _schema_of_format(self) -> Any:
        return None if self.response_format is None else self.response_format.schema_of_answer

    @property
    def schema_of_answer(self) -> Any:
        if self.forced:
            return forced_schema(self)
        return self.json_schema if self._schema_of_format is None else self._schema_of_format

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
    def n_prompts(self) -> int:
        return len(self.prompts)

    @property
    def answers(self) -> int:
        return self.best_of or self.n

    @property
    def most_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def token_limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default for this endpoint
