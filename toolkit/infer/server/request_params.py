"""The sampling settings of a request: OpenAI's fields, and the server's defaults.

The defaults are those of the target's generation config, as in vLLM and SGLang.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.infer.request.params import LEAST_TEMPERATURE, SamplingError, SamplingParams
from toolkit.infer.server.protocol import CompletionRequest, GenerationFields
from toolkit.log import get_logger
from toolkit.targets.target import Target

logger = get_logger(__name__)

OPENAI_DEFAULTS = SamplingParams(temperature=1.0)
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # settings that a target may state
NOT_APPLIED = {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}


def request_params(body: GenerationFields, defaults: SamplingParams, room: int) -> SamplingParams:
    """The settings of the request's first answer. room: tokens left in the context for it. Raises SamplingError."""
    stated = {name: value for name in DEFAULTED if (value := getattr(body, name)) is not None}
    return replace(
        defaults,
        **stated | ({"top_k": max(stated["top_k"], 0)} if "top_k" in stated else {}),
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
        prompt_logprobs=body.logprobs if isinstance(body, CompletionRequest) and body.echo else None,
        json_schema=body.schema_of_answer,
        regex=body.regex,
    )


def for_answer(params: SamplingParams, index: int) -> SamplingParams:
    """The settings of the request's answer `index`: add `index` to the seed, modulo 2**64.

    Without a seed all answers have the same settings; the engine draws a seed for each."""
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)


def default_sampling(target: Target) -> SamplingParams:
    """The settings of the target's generation config, else OpenAI's. Log a warning for those that the engine does not
    apply or take."""
    config: Any = getattr(target.model, "generation_config", None)
    stated: dict[str, Any] = {} if config is None else config.to_diff_dict()
    for name, neutral in NOT_APPLIED.items():
        if stated.get(name) not in (None, neutral):
            logger.warning("the target's generation config asks for %s=%s, which is not applied", name, stated[name])
    settings = OPENAI_DEFAULTS
    for name in DEFAULTED:
        if stated.get(name) is None:
            continue
        try:
            settings = replace(settings, **{name: _as_meant(name, stated[name])})
        except SamplingError as error:
            default = getattr(settings, name)
            logger.warning("the target's generation config: %s. The default %s=%g is taken", error, name, default)
    return settings


def default_temperature(target: Target) -> float:
    """The temperature of requests that state none."""
    return default_sampling(target).temperature


def described(settings: SamplingParams) -> str:
    """The defaults in one line, without those that are off."""
    parts = [f"temperature {settings.temperature:g}", f"top_p {settings.top_p:g}"]
    off = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
    return ", ".join(
        parts + [f"{name} {getattr(settings, name):g}" for name in off if getattr(settings, name) != off[name]]
    )


def _as_meant(name: str, value: Any) -> Any:
    """A setting of a generation config as other engines read it: -1 of a count is off, a temperature near 0 greedy."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name == "top_k" and value == value // 1:
        return max(0, int(value))
    return 0.0 if name == "temperature" and 0 <= value < LEAST_TEMPERATURE else value
