"""What a request passes before the engine has it: its number of answers, the queue, the size of its text, its time."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from transformers.convert_slow_tokenizer import bytes_to_unicode

from toolkit.infer.engine.engine_thread import EngineThread
from toolkit.infer.request.params import Cause, DraftShapeError, RequestCutError, SamplingError, VerifyError
from toolkit.infer.server.api_errors import ApiError, context_length_exceeded, cut_off, queue_is_full
from toolkit.infer.server.openai_protocol import GenerationFields
from toolkit.infer.server.request_params import wrong_setting
from toolkit.infer.server.server_settings import ServerSettings

SHRINKS = {None: 1, "NFC": 4}  # normalizer -> bytes of a text for one byte of its normal form, at most
KEEP_ALL = {"Sequence", "Split", "ByteLevel", "Digits"}  # pre-tokenizers that drop no character


class Admission:
    """Lets requests in while the queue has room."""

    def __init__(self, engine: EngineThread, max_running_requests: int, settings: ServerSettings) -> None:
        self._engine, self._running, self._settings = engine, max_running_requests, settings

    @contextlib.contextmanager
    def places(self, n: int, prompts: int = 1) -> Iterator[None]:
        """Keep the places of n answers to each prompt until they are put. Raises the 400 or the 429 for too many."""
        if n > self._settings.max_n:
            message = f"'n' is {n}; this server writes at most {self._settings.max_n} answers a request (--max-n)"
            raise ApiError(400, message, param="n", code="invalid_value")
        waiting = self._engine.open + n * prompts - self._running
        if waiting > self._settings.max_queued_requests:
            raise queue_is_full(waiting, self._settings.max_queued_requests)
        with self._engine.reserving(n * prompts):
            yield


@dataclass(frozen=True)
class Deadline:
    """The time of a request, from its arrival. seconds, at (of time.monotonic): None: it is not cut. own: it asked."""

    seconds: float | None
    own: bool
    at: float | None

    @classmethod
    def of(cls, asked: float | None, most: float | None, arrived: float) -> Self:
        """asked, most: seconds by the request and by the server. arrived: seconds of time.monotonic."""
        seconds = min((one for one in (asked, most) if one is not None), default=None)
        return cls(seconds, asked is not None and seconds == asked, None if seconds is None else arrived + seconds)

    @property
    def left(self) -> float | None:
        """Seconds until the end, at least 0."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def error(self, cause: Cause) -> ApiError:
        """What is told of a request that was cut before its answer began."""
        return cut_off(cause, self.seconds, own=self.own)


class PromptLimit:
    """Refuses a text that cannot fit into the context before it is tokenised, which takes seconds for megabytes.

    most_bytes: the context times the bytes of the longest token; None: of this tokenizer nothing can be said, since it
    may drop characters or have one token for any unknown word.
    """

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        self.context_length = context_length
        self._longest = _longest_token(tokenizer)
        self.most_bytes = None if self._longest is None else context_length * self._longest

    def check(self, text: str, max_tokens: int | None, param: str) -> None:
        """Raise the 400 for a text that surely has more tokens than the context. param: the field it came in."""
        if self.most_bytes is None or self._longest is None or len(text) <= self.most_bytes // 4:
            return
        size = len(text.encode())
        if size > self.most_bytes:
            least = -(-size // self._longest)
            raise context_length_exceeded(least, max_tokens, self.context_length, param, at_least=True)


def _longest_token(tokenizer: Any) -> int | None:
    """The bytes of text that one token holds at most; None: not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    form, vocabulary = json.loads(backend.to_str()), tokenizer.get_vocab()
    normalizer = (form["normalizer"] or {}).get("type")
    pre = form["pre_tokenizer"] or {}
    kinds = {pre.get("type"), *(one["type"] for one in pre.get("pretokenizers", ()))}
    stripping = any(one["lstrip"] or one["rstrip"] for one in form["added_tokens"])
    whole = all(char in vocabulary for char in bytes_to_unicode().values())  # else unknown bytes are dropped
    if form["model"]["type"] != "BPE" or form["truncation"] or stripping or not whole or normalizer not in SHRINKS:
        return None
    if "ByteLevel" not in kinds or not kinds <= KEEP_ALL or '"Removed"' in json.dumps(pre):
        return None
    return SHRINKS[normalizer] * max(len(piece.encode()) for piece in vocabulary)


def told(error: BaseException, body: GenerationFields, param: str, deadline: Deadline) -> BaseException:
    """What a client is told of an error before its answer begins; other errors as they are. param: of the prompt."""
    if isinstance(error, SamplingError):
        return wrong_setting(error, body)
    if isinstance(error, DraftShapeError):
        return ApiError(400, str(error), param="shape", code="invalid_value")
    if isinstance(error, VerifyError):
        return ApiError(400, str(error), param="verify", code="invalid_value")
    if isinstance(error, TimeoutError):
        return deadline.error("deadline")
    if isinstance(error, RequestCutError):
        return deadline.error(error.cause)
    if isinstance(error, ValueError):  # the engine's other checks, e.g. ids outside the vocabulary
        return ApiError(400, str(error), param=param, code="invalid_value")
    return error
