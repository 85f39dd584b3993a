"""Sampling parameters of one request, and the errors of settings, requests and targets that the engine refuses."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolkit.errors import TargetError

# The sampler divides, scales and shifts logits in fp32: beyond these bounds they overflow to infinity.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-5, 1e4
MOST_PENALTY = 1e4
MOST_BIAS = 1e4
MOST_LOGPROBS = 20  # OpenAI's limit of top_logprobs


class SamplingError(ValueError):
    """A sampling setting outside its range; `field` is the setting's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class DraftShapeError(ValueError):
    """An impossible draft shape, or one that this draft head cannot draft."""

    field = "shape"


class EngineError(ValueError):
    """Engine settings, or a request, that cannot work as given."""


Cause = Literal["deadline", "shutdown"]  # why a request was cut


class RequestCutError(RuntimeError):
    """A request was cut before the engine took it."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(f"the request was cut ({cause}) before the engine took it")
        self.cause: Cause = cause


class VerifyError(EngineError):
    """A request asks for a rule of verification that its engine does not have."""

    field = "verify"


class UnsupportedTargetError(TargetError):
    """The target's attention has a feature that the engine does not implement, so the answers would differ."""


class CompileError(EngineError):
    """The target's layers cannot be compiled: the machine lacks a tool, or torch.compile rejects the target's code."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request, in the order in which they act on the target's logits:

    repetition_penalty: positive logits of the prompt's and the answer's tokens are divided by it, negative ones are
        multiplied by it (1: off; arXiv 1909.05858, with the formula of Hugging Face and vLLM).
    frequency_penalty, presence_penalty: subtracted from the logit of a token of the answer so far; the first once per
        occurrence, the second once (0: off; OpenAI's definition).
    logit_bias: {token id: value added to its logit}; stored as pairs in the order of the ids.
    min_tokens: the answer has at least this many tokens before a stop id can be chosen or a stop string can begin.
    json_schema, regex: the answer must match this JSON schema (its text, or a mapping) or this regular expression, as a
        whole; one of the two at most (see grammar.py). Tokens that cannot continue such an answer get the logit -inf,
        and a stop id of the target can be chosen only where the answer is complete. max_tokens may cut it earlier;
        min_tokens, ignore_eos, stop_ids and stop do not go with it.
    temperature: 0 takes the most probable token; above 0 the token is sampled from softmax(logits / temperature).
    top_k: keeps the k most probable tokens (0: all). top_p then keeps the smallest set whose mass reaches it (1: all).
        min_p then keeps the tokens at least min_p times as probable as the most probable one (0: all; arXiv
        2407.01082). Tokens exactly as probable as the last kept one are kept too.
    seed: seed of the request's random draws; None: each request gets its own random seed. A draw is a pure function of
        (seed, index of the token in the sequence, logits), so speculative and plain decoding with one seed write the
        same tokens in float32; in bfloat16 they may part where two draws are nearly equal. (With verify="rejection" and
        "block" the tokens also depend on the drafts; only their distribution is that of plain decoding.)

    End of the answer:
    max_tokens: maximum number of output tokens. The answer also ends at the target's context limit.
    ignore_eos: do not stop at the target's own stop ids (`stop_ids` below still end the answer).
    stop_ids: additional ids that end the answer; the stop id is the last output id.
    stop: strings that end the answer; the token that completes one is the last output id. Only the text of the answer
        is searched, without special tokens.

    logprobs: None keeps none; n keeps each token's log-probability and those of the n most probable tokens. They are
        the log-softmax of the target's own logits, before every setting above (also the default of vLLM and SGLang).

    prompt_logprobs: the same for the prompt's tokens after the first, whose text is then read whole.

    Raises `SamplingError` for a setting outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 128
    ignore_eos: bool = False
    stop_ids: Sequence[int] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_grammar()
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        self._set("logit_bias", tuple(sorted((int(token), float(value)) for token, value in bias)))
        self._set("stop_ids", tuple(int(token) for token in self.stop_ids))
        self._set("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        self._check_distribution()
        self._check_end()

    def seeded(self) -> SamplingParams:
        """Return these settings with a seed: a random one if none was given and the temperature is above 0."""
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(63) if self.temperature > 0 else 0)

    @property
    def has_grammar(self) -> bool:
        """Whether the answer must match a schema or a regular expression."""
        return self.json_schema is not None or self.regex is not None

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return dict(self.logit_bias)

    def check_ids(self, vocab_size: int) -> None:
        """Raise `SamplingError` for a biased id or a stop id outside the vocabulary."""
        for name, ids in (("logit_bias", self.biases), ("stop_ids", self.stop_ids)):
            wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise SamplingError(name, f"{name} has the id {wrong}; the target's vocabulary is 0..{vocab_size - 1}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _need(self, holds: bool, name: str, needed: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise SamplingError(name, f"{name} is {list(value) if isinstance(value, tuple) else value}; {needed}")

    def _check_types(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            self._need(isinstance(value, (int, float)) and not isinstance(value, bool), name, "it must be a number")
        for name in ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"):
            value, optional = getattr(self, name), name in ("seed", "logprobs", "prompt_logprobs")
            whole = isinstance(value, int) and not isinstance(value, bool)
            self._need(whole or (optional and value is None), name, "it must be a whole number")

    def _check_grammar(self) -> None:
        if isinstance(self.json_schema, Mapping):
            try:
                self._set("json_schema", json.dumps(dict(self.json_schema)))
            except (TypeError, ValueError, RecursionError) as error:
                raise SamplingError("json_schema", f"json_schema cannot be written as JSON: {error}") from error
        for name in ("json_schema", "regex"):
            value = getattr(self, name)
            wanted = "a text of a JSON object, or a mapping" if name == "json_schema" else "a text"
            self._need(value is None or isinstance(value, str), name, f"it must be {wanted}")
        if not self.has_grammar:
            return
        name = "regex" if self.json_schema is None else "json_schema"
        others = {"regex": name != "regex" and self.regex is not None, "ignore_eos": self.ignore_eos}
        others |= {"min_tokens": self.min_tokens > 0, "stop": bool(self.stop), "stop_ids": bool(self.stop_ids)}
        for other, given in others.items():
            why = "give one of the two" if other == "regex" else "its answer ends where it is complete: leave this out"
            self._need(not given, other, f"{name} is given too; {why}")

    def _check_distribution(self) -> None:
        self._need(
            self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE,
            "temperature",
            f"it must be 0 (greedy) or lie in [{LEAST_TEMPERATURE:g}, {MOST_TEMPERATURE:g}]",
        )
        self._need(0 < self.top_p <= 1, "top_p", "it must lie in (0, 1]; 1 keeps every token")
        self._need(0 <= self.top_k < 2**31, "top_k", "it must be 0 (keep every token) or a count below 2**31")
        self._need(0 <= self.min_p <= 1, "min_p", "it must lie in [0, 1]; 0 keeps every token")
        self._need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "it must fit into 64 signed bits")
        within = 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY
        self._need(within, "repetition_penalty", f"it must lie in [{1 / MOST_PENALTY:g}, {MOST_PENALTY:g}]; 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            self._need(-2 <= getattr(self, name) <= 2, name, "it must lie in [-2, 2]; 0 is off")
        biases = self.biases
        self._need(min(biases, default=0) >= 0, "logit_bias", "token ids start at 0")
        self._need(len(biases) == len(self.logit_bias), "logit_bias", "each token id may have one bias")
        bounded = all(abs(value) <= MOST_BIAS for value in biases.values())
        self._need(
            bounded, "logit_bias", f"a bias must lie in [{-MOST_BIAS:g}, {MOST_BIAS:g}]; -100 is enough to ban a token"
        )

    def _check_end(self) -> None:
        self._need(1 <= self.max_tokens < 2**31, "max_tokens", "it must be at least 1 and below 2**31")
        self._need(
            0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"it must lie in [0, {self.max_tokens}] (max_tokens)"
        )
        self._need("" not in self.stop, "stop", "a stop string must not be empty; leave it out")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            within = asked is None or 0 <= asked <= MOST_LOGPROBS
            self._need(within, name, f"it must be None or lie in [0, {MOST_LOGPROBS}]")
