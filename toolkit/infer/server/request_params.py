"""The sampling settings of a request: OpenAI's fields, and the server's defaults.

The defaults are those of the target's generation config, as in vLLM and SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from toolkit.infer.request.params import LEAST_TEMPERATURE, SamplingError, SamplingParams
from toolkit.infer.server.api_errors import ApiError
from toolkit.infer.server.protocol import GenerationFields
from toolkit.log import get_logger
from toolkit.targets.target import Target

logger = get_logger(__name__)

FIELD_OF = {"stop_ids": "stop_token_ids", "logprobs": "top_logprobs"}  # setting -> OpenAI's name, where it differs
NOT_APPLIED = {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}


def request_params(body: GenerationFields, defaults: DefaultSampling, room: int) -> SamplingParams:
    """The settings of the request's first answer. room: tokens left in the context for it. Raises SamplingError."""
    stated = {one.name: getattr(body, one.name) for one in fields(defaults)}
    chosen = {name: getattr(defaults, name) if value is None else value for name, value in stated.items()}
    return SamplingParams(
        **chosen | {"top_k": max(chosen["top_k"], 0)},
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        seed=body.seed,
        max_tokens=room if body.token_limit is None else max(1, body.token_limit),
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_ids=body.stop_token_ids,
        stop=body.stops,
        logprobs=0 if body.n_logprobs is None and body.answers > body.n else body.n_logprobs,
        prompt_logprobs=body.n_prompt_logprobs,
        json_schema=body.schema_of_answer,
        regex=body.regex,
    )


def for_answer(params: SamplingParams, index: int) -> SamplingParams:
    """The settings of the request's answer `index`: add `index` to the seed, modulo 2**64.

    Without a seed all answers have the same settings; the engine draws a seed for each."""
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)


def wrong_setting(error: SamplingError, body: GenerationFields) -> ApiError:
    """The 400 for an invalid sampling setting."""
    param = FIELD_OF.get(error.field, error.field)
    if param == "json_schema" and body.json_schema is None:
        param = "tools" if getattr(body, "forced", False) else "response_format"
    return ApiError(400, str(error), param=param, code="invalid_value")


@dataclass(frozen=True)
class DefaultSampling:
    """The default settings of one server. Settings that the target does not state have OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, target: Target) -> DefaultSampling:
        """Read the target's generation config. Log a warning for settings that the engine does not apply or take."""
        config: Any = getattr(target.model, "generation_config", None)
        stated: dict[str, Any] = {} if config is None else config.to_diff_dict()
        for name, neutral in NOT_APPLIED.items():
            if stated.get(name) not in (None, neutral):
                logger.warning(
                    "the target's generation config asks for %s=%s, which is not applied", name, stated[name]
                )
        settings: dict[str, Any] = {}
        for name in (field.name for field in fields(cls)):
            if stated.get(name) is None:
                continue
            value = _as_meant(name, stated[name])
            try:
                settings[name] = getattr(SamplingParams(**{name: value}), name)
            except SamplingError as error:
                default = getattr(cls, name)
                logger.warning("the target's generation config: %s. The default %s=%g is taken", error, name, default)
        return cls(**settings)

    @property
    def text(self) -> str:
        """The settings in one line, without those that are off."""
        parts = [f"temperature {self.temperature:g}", f"top_p {self.top_p:g}"]
        parts += [f"top_k {self.top_k}"] if self.top_k else []
        parts += [f"min_p {self.min_p:g}"] if self.min_p else []
        parts += [f"repetition_penalty {self.repetition_penalty:g}"] if self.repetition_penalty != 1 else []
        return ", ".join(parts)


def default_temperature(target: Target) -> float:
    """The temperature of requests that state none."""
    return DefaultSampling.of(target).temperature


def _as_meant(name: str, value: Any) -> Any:
    """A setting of a generation config as other engines read it: -1 of a count is off, a temperature near 0 greedy."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name == "top_k" and value == value // 1:
        return max(0, int(value))
    return 0.0 if name == "temperature" and 0 <= value < LEAST_TEMPERATURE else value
