"""One OpenAI-compatible server (vLLM, SGLang, llama.cpp, `toolkit serve`) that writes answers of the target.

Prompts go to /v1/completions as token ids, so that the chat template is rendered here alone. Where the server returns
token ids (`return_token_ids` of vLLM, SGLang and ours) these are the answer. Else its text is tokenised behind the
prompt's. These are the ids that the target wrote only if the prompt's ids stay the same and the answer's have the
number that the server states. Other answers have the finish reason NO_ROUND_TRIP and no ids. A prompt that a server
refuses although it answers others, as one beyond a context length that its model card does not state, has REFUSED.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from toolkit.data.chat_template import decode, encode
from toolkit.data.generation import NO_ROUND_TRIP, REFUSED, GenerationRequest, GenerationResult
from toolkit.log import get_logger
from toolkit.targets.facts import ServedTarget
from toolkit.targets.target import end_of_turn_id

logger = get_logger(__name__)

# Sampling by temperature and top_p alone: the defaults of servers come from the target's generation config.
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 600.0  # and a second for each token of an answer
TOO_LONG = (400, 413)  # what servers say to a prompt beyond their context, and to other requests that they cannot read
BUSY = (408, 425, 429)  # these, and all from 500, may succeed later
VERSION_PATHS = ("/version", "/get_server_info")  # vLLM and ours, SGLang


class ServerError(ValueError):
    """No server answers, or one refuses a request, or serves another model. status: of its reply, if it refuses."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(Exception):
    """A request failed, and may succeed later. wait: seconds that the server asks for. busy: so it says."""

    def __init__(self, message: str, wait: float = 0.0, *, busy: bool = False) -> None:
        super().__init__(message)
        self.wait, self.busy = wait, busy


class OpenAIServer:
    """url: ends in /v1. `model`, `provenance` and `context_length` are known after `identify`."""

    def __init__(self, url: str, target: ServedTarget, client: httpx.AsyncClient) -> None:
        self.url = url
        self.model = ""
        self.provenance: dict[str, Any] = {}
        self.context_length: int | None = None
        self._target, self._client = target, client
        self._answers = self._refuses = False  # some prompt, since `identify`
        end_of_turn = end_of_turn_id(target.tokenizer)
        self._end_id = target.tokenizer.eos_token_id if end_of_turn is None else end_of_turn

    async def identify(self) -> None:
        """Find the target among the server's models. Raises `ServerError` if it serves another one, `Unavailable`."""
        listed = await self._ask("GET", "/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise ServerError(f"{self.url}/models lists no models as OpenAI's API does; give the URL of such a server")
        found = next(((card, why) for card in cards if (why := self._matches(card)) is not None), None)
        if found is None:
            wanted = self._target.served_model
            asked = f"the target is {self._target.name!r}" if wanted is None else f"rollouts.server_model is {wanted!r}"
            raise ServerError(
                f"{self.url} serves {', '.join(repr(card['id']) for card in cards) or 'no model'}, but {asked}; serve "
                "the target there, or set rollouts.server_model to the name that the target has there"
            )
        card, why = found
        version = await self._version()
        if card["id"] != self.model:
            log = (self.url, card["id"], card.get("owned_by"), version, why)
            logger.info("%s serves %s by %s %s: it is the target by %s", *log)
        self._answers = False
        self.model, self.context_length = card["id"], card.get("max_model_len")
        self.provenance = {"model": self.model, "engine": card.get("owned_by"), "version": version}

    async def answer(self, request: GenerationRequest) -> GenerationResult:
        """Raises `ServerError` if the server refuses the request, `Unavailable` if it fails."""
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop_token_ids": sorted(self._target.stop_ids),
            "return_token_ids": True,
            **NEUTRAL,
        }
        reply = await self._complete(body)
        if reply is None:
            return GenerationResult([], REFUSED, server=self.provenance)
        try:
            choice, model = reply["choices"][0], reply.get("model", self.model)
            reason, ids = choice["finish_reason"], choice.get("token_ids")
            if ids is None:
                ids = self._tokenised(request.prompt_ids, choice, reply["usage"]["completion_tokens"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{self.url}/completions answers in another form than OpenAI's: {_short(reply)}"
            ) from error
        if model != self.model:
            raise ServerError(f"{self.url} was asked for the model {self.model!r}, but {model!r} answered")
        if reason not in ("stop", "length"):  # it shuts down, for example
            raise Unavailable(f"an answer ended with finish_reason {reason!r}")
        stopped = bool(ids) and ids[-1] in self._target.stop_ids
        if ids is None or (reason == "stop" and not stopped):
            return GenerationResult([], NO_ROUND_TRIP, server=self.provenance)
        return GenerationResult(ids, "stop" if stopped else "length", server=self.provenance)

    async def _complete(self, body: Mapping[str, Any]) -> Any:
        """The reply to a completion; None if the server refuses this prompt alone. Raises as `_ask`."""
        seconds = READ_TIMEOUT_S + body["max_tokens"]
        try:
            reply = await self._ask("POST", "/completions", body, seconds)
        except ServerError as error:
            if error.status not in TOO_LONG:
                raise
            if not self._answers:
                try:  # one id, to learn whether the prompt is the reason
                    await self._ask("POST", "/completions", {**body, "prompt": body["prompt"][:1]}, seconds)
                except ServerError:
                    raise error from None
            log = logger.debug if self._refuses else logger.warning
            log("%s; conversations with such prompts are skipped, and counted as %s", error, REFUSED)
            self._answers = self._refuses = True
            return None
        self._answers = True
        return reply

    def _matches(self, card: Mapping[str, Any]) -> str | None:
        """What shows that a model of the server is the target; None if it is another one.

        `root` (vLLM, SGLang) is what was loaded under the name `id`.
        """
        if self._target.served_model is not None:
            return "rollouts.server_model" if card["id"] == self._target.served_model else None
        names = {key: card[key] for key in ("id", "root") if card.get(key)}
        for same, how in ((_same_name, "its {}"), (_same_last_part, "the last part of its {}")):
            for key, name in names.items():
                if same(self._target.name, name):
                    return how.format(f"{key} {name!r}")
        return None

    def _tokenised(self, prompt: Sequence[int], choice: Mapping[str, Any], count: int) -> list[int] | None:
        """The ids of an answer's text, and the stop id, if they are `count`; else None."""
        tokenizer = self._target.tokenizer
        whole = encode(tokenizer, decode(tokenizer, prompt) + choice["text"])
        ids = whole[len(prompt) :]
        if choice["finish_reason"] == "stop":
            stated = (choice.get("matched_stop"), choice.get("stop_reason"))  # of SGLang, of vLLM
            ids.append(next((one for one in stated if one in self._target.stop_ids), self._end_id))
        return ids if whole[: len(prompt)] == list(prompt) and len(ids) == count else None

    async def _version(self) -> str | None:
        for path in VERSION_PATHS:
            try:
                found = (await self._client.get(self.url.removesuffix("/v1") + path)).json()
            except (httpx.RequestError, ValueError):
                continue
            if isinstance(found, dict) and "version" in found:
                return str(found["version"])
        return None

    async def _ask(self, method: str, path: str, body: object = None, seconds: float = CONNECT_TIMEOUT_S) -> Any:
        """The JSON of the reply. Raises `ServerError`, `Unavailable`."""
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=seconds, pool=None)
        try:
            reply = await self._client.request(method, self.url + path, json=body, timeout=timeout)
        except httpx.RequestError as error:
            raise Unavailable(f"{type(error).__name__} {error}".strip()) from error
        busy = reply.status_code in BUSY
        if busy or reply.status_code >= 500:
            raise Unavailable(f"status {reply.status_code}: {_short(reply.text)}", _retry_after(reply), busy=busy)
        if not reply.is_success:
            hint = "; set OPENAI_API_KEY to its key" if reply.status_code in (401, 403) else ""
            raise ServerError(
                f"{self.url}{path} refuses (status {reply.status_code}): {_short(reply.text)}{hint}", reply.status_code
            )
        try:
            return reply.json()
        except ValueError as error:
            raise Unavailable(f"{path} answers no JSON: {_short(reply.text)}") from error


def _retry_after(reply: httpx.Response) -> float:
    """Seconds of the header Retry-After, which is a number or a date; 0 without one."""
    text = reply.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a zone
        return 0.0


def _same_name(one: str, other: str) -> bool:
    """Whether two names of models are equal: hub ids in any case, folders by their real path."""
    return one.lower() == other.lower() or (Path(one).exists() and os.path.realpath(one) == os.path.realpath(other))


def _same_last_part(one: str, other: str) -> bool:
    """Whether two names without organisation and folder are equal, of which one has none: it does not contradict."""
    parts = [name.rstrip("/").rpartition("/") for name in (one, other)]
    (before, _, mine), (after, _, theirs) = parts
    bare = not before or not after
    return bare and mine.removesuffix(".gguf").lower() == theirs.removesuffix(".gguf").lower()


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
